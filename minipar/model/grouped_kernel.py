"""`grouped_swiglu` by torch's grouped matrix product: one kernel launch for all experts, instead of one for each.

    product   [R, K] x [E, K, N] -> [R, N]    row r times the matrix of its expert
    outer     [R, M] x [R, N] -> [E, M, N]    for each expert, the sum over its rows of a_r b_r^T

The number of rows per expert stays on the GPU, so that the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.model.deferrable_linear import WeightGradients, accumulate_gradient

ALIGNMENT_BYTES = 16  # the size of a row must be a multiple of this

# The queue that gets the deferred weight gradients, and the weights gate, up and down.
DeferredTo = tuple[WeightGradients, tuple[Tensor, Tensor, Tensor]]


def kernel_takes(x: Tensor, gate: Tensor) -> bool:
    """Return whether torch's grouped kernel takes these tensors: bfloat16 on a GPU, with rows of a multiple of 16 bytes.

    x  [R, D]    gate  [E, F, D]
    """
    sizes = gate.shape[1] * gate.itemsize, gate.shape[2] * gate.itemsize
    aligned = not any(size % ALIGNMENT_BYTES for size in sizes)
    return x.is_cuda and x.dtype == gate.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


class KernelExperts(torch.autograd.Function):
    """`_Experts` of grouped_mlp.py, computed by torch's grouped kernel. `ends` [E] int32: where each expert's rows end."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, deferred_to: DeferredTo | None, anchor: Tensor | None,
        gate: Tensor, up: Tensor, down: Tensor,
    ) -> Tensor:  # fmt: skip
        product = partial(F.grouped_mm, offs=ends)
        g, u = product(x, gate.transpose(1, 2)), product(x, up.transpose(1, 2))
        ctx.deferred_to = deferred_to
        ctx.save_for_backward(x, g, u, ends, gate, up, down)
        y: Tensor = product(F.silu(g).mul_(u), down.transpose(1, 2))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, u, ends, gate, up, down = ctx.saved_tensors
        product, dy = partial(F.grouped_mm, offs=ends), dy.contiguous()
        dh = product(dy, down)
        dg = torch.ops.aten.silu_backward(dh * u, g)
        du = dh.mul_(F.silu(g))
        dx = product(dg, gate).add_(product(du, up)) if ctx.needs_input_grad[0] else None
        saved, needed = (x, g, u, dg, du, dy, ends), ctx.needs_input_grad[4:]
        if ctx.deferred_to is not None:
            queue, weights = ctx.deferred_to
            queue.put(partial(_add_later, weights, saved))
        dweights = _outer_products(*saved) if any(needed) else (None,) * 3
        return dx, None, None, None, *(dw if n else None for dw, n in zip(dweights, needed))


def _outer_products(
    x: Tensor, g: Tensor, u: Tensor, dg: Tensor, du: Tensor, dy: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up [E, F, D] and of down [E, D, F]."""
    outer = partial(F.grouped_mm, offs=ends)
    return outer(dg.t(), x), outer(du.t(), x), outer(dy.t(), F.silu(g).mul_(u))


@torch.no_grad()
def _add_later(weights: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    for weight, dw in zip(weights, _outer_products(*saved)):
        accumulate_gradient(weight, dw)
