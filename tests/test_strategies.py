"""What the other tests mean by equal, and draw from, is itself held to its word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.mesh import Mesh
from tests.strategies import assert_equal_to, mesh_sizes, num_ranks, splits

b = torch.tensor([1e-6, -2.0, 0.0], dtype=torch.float64)
zero = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (b, b),
        (b + 1.9e-10, b),  # a tensor's largest entry sets the limit for all of them
        (b * 1e-9 + 1e-19, b * 1e-9),  # small is not zero: the limit shrinks with it
        (zero + 9e-15, zero),
        (zero - 9e-15, zero + 1e-17),  # rounding alone
        (zero[:0], zero[:0]),
    ],
)
def test_equal_but_for_the_order_of_additions_passes(a, b):
    assert_equal_to(a, b)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (b + 2.1e-10, b, "w: max|a - b| = 2.1"),
        (b * 1e-9 + 1e-18, b * 1e-9, "w: max|a - b|"),
        (zero + 1.1e-14, zero, "w: max|a - b|"),
        (b.where(b > -1, torch.nan), b, "w: max|a - b| = nan"),
        (b[:2], b, r"w: shape (2,), want (3,)"),
        (b.float(), b, "w: dtype torch.float32, want torch.float64"),
    ],
)
def test_anything_more_fails_and_says_what_and_by_how_much(a, b, message):
    with pytest.raises(AssertionError) as failure:
        assert_equal_to(a, b, what="w")
    assert message in str(failure.value)


@given(mesh_sizes(), mesh_sizes(max_ranks=6, axes=("dp", "tp")))
def test_drawn_meshes_are_meshes_within_their_limits(sizes, few):
    assert Mesh(num_ranks(sizes), **sizes).world_size <= 8
    assert few["dp"] * few["tp"] == num_ranks(few) <= 6


@given(st.integers(0, 9), st.integers(1, 5), st.data())
def test_drawn_splits_cut_the_total_into_as_many_parts_as_asked(total, parts, data):
    sizes = data.draw(splits(total, parts))
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert min(sizes) >= 0
