"""One SwiGLU per expert, each applied to its own run of rows: a grouped matrix product, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.model import autocast
from minipar.model.deferrable_linear import WeightGradients, accumulate_gradient
from minipar.model.grouped_kernel import DeferredTo, KernelExperts, kernel_takes
from minipar.support.staging import to_device


def grouped_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    counts: Sequence[int] | Tensor,
    deferred: WeightGradients | None = None,
) -> Tensor:
    """Apply each expert's SwiGLU to its run of rows: y_r = down_e (silu(gate_e x_r) * up_e x_r), where e is row r's expert.

    x         [R, D]      rows sorted by expert
    gate, up  [E, F, D]   down  [E, D, F]
    counts    E numbers, or [E] on x's device: the number of rows of each expert; their sum is R, and any may be 0
    y         [R, D]

    With g = gate_e x_r, u = up_e x_r:
    backward   dh = down_e^T dy,  dg = dh * u * silu'(g),  du = dh * silu(g)
               dx    = gate_e^T dg + up_e^T du              [R, D]      at once
               dgate = sum over e's rows of dg x^T, and so on           at once, or as one entry of `deferred`

    Costs 6 R D F flops forward and 12 R D F backward: nothing is padded. An expert without rows has a gradient of 0.
    Keeps x, g and u: 2 R F elements in addition to x. Autograd would also keep silu(g) and silu(g) * u.
    Source: MegaBlocks, arXiv:2211.15841. Here, a loop of dense products, or torch's grouped product
    (`grouped_kernel.py`) where it takes these tensors, replaces the paper's block-sparse kernel.
    """
    x, *weights = autocast.cast(x, gate, up, down)
    inputs: tuple[object, ...] = None, None, *weights
    if deferred is not None and all(w.requires_grad and w.is_leaf for w in weights):
        # Autograd must not see a parameter whose gradient is deferred, or it would run the parameter's hooks too early.
        anchor = None if x.requires_grad else deferred.anchor
        inputs = (deferred, tuple(weights)), anchor, *(w.detach() for w in weights)
    y: Tensor
    if kernel_takes(x, weights[0]):
        ends = to_device(torch.as_tensor(counts), x.device).cumsum(0, dtype=torch.int32)
        y = KernelExperts.apply(x, ends, *inputs)  # type: ignore[no-untyped-call]
    else:
        rows = counts.tolist() if isinstance(counts, Tensor) else counts
        y = _Experts.apply(x, rows, *inputs)  # type: ignore[no-untyped-call]
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Sequence[int], deferred_to: DeferredTo | None, anchor: Tensor | None,
        gate: Tensor, up: Tensor, down: Tensor,
    ) -> Tensor:  # fmt: skip
        g, u = (x.new_empty(x.shape[0], gate.shape[1]) for _ in range(2))
        y = torch.empty_like(x)
        for e, rows in _expert_slices(counts):
            torch.mm(x[rows], gate[e].t(), out=g[rows])
            torch.mm(x[rows], up[e].t(), out=u[rows])
            torch.mm(F.silu(g[rows]).mul_(u[rows]), down[e].t(), out=y[rows])
        ctx.counts, ctx.deferred_to = counts, deferred_to
        ctx.save_for_backward(x, g, u, gate, up, down)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, u, gate, up, down = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[4:]
        dweights = [torch.empty_like(w) for w in (gate, up, down)] if any(needed) else []
        saved_per_expert = []
        # Finish one expert before the next, while its rows are in the CPU's cache.
        for e, rows in _expert_slices(ctx.counts):
            dh = dy[rows] @ down[e]
            dg = torch.ops.aten.silu_backward(dh * u[rows], g[rows])
            du = dh.mul_(F.silu(g[rows]))
            if dx is not None:
                torch.mm(dg, gate[e], out=dx[rows]).addmm_(du, up[e])
            piece = x[rows], g[rows], u[rows], dg, du, dy[rows]
            if ctx.deferred_to is not None:
                saved_per_expert.append(piece)
            elif dweights:
                _weight_products(*piece, *(dw[e] for dw in dweights))
        if ctx.deferred_to is not None:
            queue, weights = ctx.deferred_to
            queue.put(partial(_add_later, weights, [w.shape for w in (gate, up, down)], saved_per_expert))
        return dx, None, None, None, *(dweights[i] if n else None for i, n in enumerate(needed))


def _weight_products(
    x: Tensor,
    g: Tensor,
    u: Tensor,
    dg: Tensor,
    du: Tensor,
    dy: Tensor,
    dgate: Tensor,
    dup: Tensor,
    ddown: Tensor,
) -> None:
    """Write one expert's weight gradients into dgate, dup and ddown."""
    torch.mm(dg.t(), x, out=dgate)
    torch.mm(du.t(), x, out=dup)
    torch.mm(dy.t(), F.silu(g).mul_(u), out=ddown)


@torch.no_grad()
def _add_later(
    weights: Sequence[Tensor], shapes: Sequence[torch.Size], saved_per_expert: Sequence[tuple[Tensor, ...]]
) -> None:
    """Add the deferred gradients, in the dtype of the rows.

    By now FSDP may have resharded the weights, and its shards have a wider dtype. So `shapes` are the weights' shapes in
    the forward.
    """
    x = saved_per_expert[0][0]
    dweights = [x.new_empty(shape) for shape in shapes]
    for e, piece in enumerate(saved_per_expert):
        _weight_products(*piece, *(dw[e] for dw in dweights))
    for weight, dw in zip(weights, dweights):
        accumulate_gradient(weight, dw)


def _expert_slices(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert and the slice of its rows."""
    start = 0
    for e, count in enumerate(counts):
        yield e, slice(start, start + count)
        start += count


class Experts(nn.Module):
    """A module around `grouped_swiglu`, with weights gate, up [E, F, D] and down [E, D, F]; `initialize` fills them."""

    deferred: WeightGradients | None = None
    has_expert_parameters = True  # `place_whole` then marks these parameters as expert parameters

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.gate = nn.Parameter(empty(num_experts, hidden_dim, dim))
        self.up = nn.Parameter(empty(num_experts, hidden_dim, dim))
        self.down = nn.Parameter(empty(num_experts, dim, hidden_dim))

    def forward(self, x: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        return grouped_swiglu(x, self.gate, self.up, self.down, counts, self.deferred)

    def extra_repr(self) -> str:
        return "num_experts={}, hidden_dim={}, dim={}".format(*self.gate.shape)
