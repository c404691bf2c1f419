"""Experts by torch's grouped matrix product: the numbers of the loop, gradients too. The CPU has the same product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.model import grouped_kernel, grouped_mlp
from minipar.model.deferrable_linear import WeightGradients
from minipar.model.grouped_mlp import grouped_swiglu
from tests.strategies import assert_equal_to

D, F = 16, 24


def results(counts, dtype, deferred, seed=0):
    """y, dx and the three weight gradients."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), D, generator=draw).to(dtype).requires_grad_()
    shapes = [(len(counts), F, D), (len(counts), F, D), (len(counts), D, F)]
    weights = [torch.nn.Parameter((torch.randn(s, generator=draw) / 4).to(dtype)) for s in shapes]
    queue = WeightGradients() if deferred else None
    y = grouped_swiglu(x, *weights, torch.tensor(counts), queue)
    y.backward(torch.randn(y.shape, generator=draw).to(dtype))
    if deferred:
        assert all(w.grad is None for w in weights)
        queue.run()
    return [y.detach(), x.grad, *(w.grad for w in weights)]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_the_kernel_gives_the_numbers_of_the_loop(counts, dtype, deferred):
    loop = results(counts, dtype, deferred)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_mlp, "kernel_takes", lambda x, gate: True)
        kernel = results(counts, dtype, deferred)
    for a, b in zip(kernel, loop):
        assert_equal_to(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "hidden", "taken"),
    [
        ("cuda", torch.bfloat16, 24, True),
        ("cuda", torch.bfloat16, 12, False),  # rows of 24 bytes
        ("cuda", torch.float32, 24, False),
        ("cpu", torch.bfloat16, 24, False),
    ],
)
def test_only_what_the_kernel_can_do_is_given_to_it(monkeypatch, device, dtype, hidden, taken):
    monkeypatch.setattr(torch.Tensor, "is_cuda", device == "cuda", raising=False)
    x, gate = torch.empty(3, D, dtype=dtype), torch.empty(2, hidden, D, dtype=dtype)
    assert grouped_kernel.kernel_takes(x, gate) == taken
