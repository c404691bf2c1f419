import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minipar.data_parallel.buckets import ALIGNMENT_BYTES, Bucket, flat_bytes, make_buckets
from tests.strategies import shapes


class Ranks:
    """As much of a Comm as planning buckets needs."""

    rank = 0

    def __init__(self, size):
        self.size = size


def parameters(shapes_, dtypes):
    return [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes_, dtypes)]


several_shapes = st.lists(shapes(max_dims=2, max_side=40), min_size=1, max_size=9)


@given(several_shapes, st.integers(1, 4000), st.integers(1, 1000), st.integers(1, 5), st.data())
def test_views_are_aligned_and_disjoint_and_buckets_keep_limits(shapes_, limit, first, size, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])) for _ in shapes_]
    params = parameters(shapes_, dtypes)
    ranks = Ranks(size)
    buckets = make_buckets(params, lambda _: ranks, limit, first, Bucket)
    held = [p for bucket in buckets for p in bucket.params]
    assert {id(p) for p in held} == {id(p) for p in params}
    assert len(held) == len(params)
    for i, bucket in enumerate(buckets):
        assert len({p.dtype for p in bucket.params}) == 1
        assert len(bucket.params) == 1 or sum(p.nbytes for p in bucket.params) <= max(
            limit, first if i == 0 else 0
        )
        assert bucket.flat.nbytes == flat_bytes(bucket.params, size, len(bucket.flagged))
        assert bucket.flat.nbytes % (size * ALIGNMENT_BYTES) == 0
        for param, view in bucket.views.items():
            assert view.shape == param.shape
            assert (view.data_ptr() - bucket.flat.data_ptr()) % ALIGNMENT_BYTES == 0 or view.numel() == 0
        for view in [*bucket.views.values(), bucket.flags]:  # they do not overlap
            view += 1
        assert bucket.flat.count_nonzero() == sum(p.numel() for p in bucket.params) + len(bucket.flagged)
        assert (bucket.flat <= 1).all()
    flagged = [p for bucket in buckets for p in bucket.flagged]
    assert {id(p) for p in flagged} == {id(p) for p in params}


def test_the_last_parameters_fill_the_first_bucket_which_is_small():
    params = parameters([(100,)] * 6, [torch.float32] * 6)
    ranks = Ranks(2)
    buckets = make_buckets(params, lambda _: ranks, 800, 400, Bucket)
    place = {p: i for i, p in enumerate(params)}
    places = [[place[p] for p in bucket.params] for bucket in buckets]
    assert places == [[5], [4, 3], [2, 1], [0]]


def test_parameters_of_different_comms_never_share_a_bucket():
    params = parameters([(10,)] * 4, [torch.float32] * 4)
    a, b = Ranks(2), Ranks(4)
    buckets = make_buckets(
        params, lambda p: a if p is params[0] or p is params[2] else b, 10_000, 10_000, Bucket
    )
    assert sorted((bucket.comm.size, len(bucket.params), len(bucket.flagged)) for bucket in buckets) == [
        (2, 2, 2),
        (4, 2, 2),
    ]


@pytest.mark.parametrize("kind", ["none", "own", "view"])
def test_collecting_keeps_the_value_and_makes_the_gradient_a_view(kind):
    param = nn.Parameter(torch.zeros(3, 5))
    ranks = Ranks(2)
    (bucket,) = make_buckets([param], lambda _: ranks, 1000, 1000, Bucket)
    bucket.views[param].fill_(7)
    if kind != "none":
        param.grad = bucket.views[param] if kind == "view" else torch.full((5, 3), 4.0).t()
    bucket.collect(param)
    want = {"none": 0.0, "own": 4.0, "view": 7.0}[kind]
    assert (bucket.views[param] == want).all()
    assert (param.grad is None) == (kind == "none")
    if param.grad is not None:
        assert param.grad.data_ptr() == bucket.flat.data_ptr()
