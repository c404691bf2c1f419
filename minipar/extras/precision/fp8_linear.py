"""Emulated linear layers with 8-bit operands: values are rounded to fp8, and multiplied in their own dtype.

    e4m3   4 bits of exponent, 3 of mantissa   largest 448      inputs and weights
    e5m2   5 bits of exponent, 2 of mantissa   largest 57344    gradients, which differ more in size

fp8 covers a small range, so a tensor is scaled first: its largest magnitude, `amax`, becomes the format's largest value.
There are three ways of scaling:

    current   amax is the tensor's own, which takes one more pass over the tensor
    delayed   amax is the largest of the last calls, so it is known in advance; a sudden larger value is clipped
    block     each block of the tensor has its own amax, so a large value costs precision only in its own block

The layers in this file are for a single process, to show these three ways. To train on a mesh in fp8 use `--products`: see
`rounded_products.py`.
Source: FP8 Formats for Deep Learning, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437, section 3.3 (blocks).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.extras.precision.formats import FORMATS, round_to
from minipar.model.deferrable_linear import Linear
from minipar.support.errors import one_of, require_positive

Scaling = Literal["current", "delayed", "block"]


def round_to_fp8(x: Tensor, kind: str, amax: Tensor) -> Tensor:
    """Round x to fp8, in x's dtype, with a scale that maps amax to the format's largest value.

    x     any shape
    amax  broadcast against x; where it is 0, x is not scaled

    Magnitudes above amax become amax. The error of an element is at most 1/16 of it (e4m3; 1/8 for e5m2), or half the
    format's smallest value, 2^-9 amax/448 (2^-16 amax/57344 for e5m2), whichever is larger.
    """
    largest = FORMATS[kind].largest
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    amax = torch.where(amax > 0, amax, largest).to(wide.dtype)
    rounded = round_to((wide * (largest / amax)).double(), FORMATS[kind])
    return (rounded.to(wide.dtype) * (amax / largest)).to(x.dtype)


def round_blocks_to_fp8(x: Tensor, kind: str, rows: int, columns: int) -> Tensor:
    """Return x [N, D] rounded to fp8, each block of `rows` x `columns` with its own amax; blocks at the edges are smaller.

    A block has a scale of 4 bytes, which is 4 / (rows * columns) bytes per element.
    """
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [N/rows, rows, D/columns, columns]
    rounded = round_to_fp8(blocks, kind, blocks.abs().amax((1, 3), keepdim=True))
    return rounded.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]


class Rounding:
    """Rounds one operand of a layer (x, w or dy) in each call.

    kind     e4m3 or e5m2
    scaling  current, delayed or block
    history  with delayed: number of calls whose amax is kept; the first call uses its own amax
    block    (rows, columns) of a block
    """

    def __init__(self, kind: str, scaling: Scaling, history: int, block: tuple[int, int]):
        self.kind, self.scaling, self.block = kind, scaling, block
        self.amaxes: deque[Tensor] = deque(maxlen=history)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [N, D], rounded."""
        if not x.numel():
            return x
        if self.scaling == "block":
            return round_blocks_to_fp8(x, self.kind, *self.block)
        amax = x.detach().abs().amax()
        if self.scaling == "current":
            return round_to_fp8(x, self.kind, amax)
        known = torch.stack(tuple(self.amaxes)).amax() if self.amaxes else amax
        self.amaxes.append(amax)
        return round_to_fp8(x, self.kind, known)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, round_x: Rounding, round_w: Rounding, round_dy: Rounding
    ) -> Tensor:
        rows, w = round_x(x.reshape(-1, x.shape[-1])), round_w(weight)
        ctx.save_for_backward(rows, w)
        ctx.round_dy, ctx.shape = round_dy, x.shape
        return (rows @ w.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, w = ctx.saved_tensors
        dy = ctx.round_dy(dy.reshape(-1, dy.shape[-1]))
        return (dy @ w).view(ctx.shape), dy.t() @ rows, None, None, None


class Fp8Linear(nn.Module):
    """A linear layer without bias whose matrix products have 8-bit operands: y = fp8(x) fp8(w)^T.

    x  [..., D]    w  [F, D], kept in its own dtype    y  [..., F]

    backward   dx = fp8(dy) fp8(w)        [..., D]
               dw = fp8(dy)^T fp8(x)      [F, D]       the x and w of the forward, dy in e5m2

    Blocks are 1 x `block` of x and dy (a row is a token), and `block` x `block` of w, as in DeepSeek-V3.
    Raises ValueError for an unknown scaling, or a history or block that is not positive.
    """

    def __init__(
        self, weight: nn.Parameter, scaling: Scaling = "delayed", history: int = 16, block: int = 128
    ):
        super().__init__()
        if scaling not in get_args(Scaling):
            raise ValueError(f"scaling={scaling!r} is unknown; use {one_of(get_args(Scaling))}")
        require_positive(history=history, block=block)
        self.weight, tile = weight, (1, block)
        self.round_x = Rounding("e4m3", scaling, history, tile)
        self.round_w = Rounding("e4m3", scaling, history, (block, block))
        self.round_dy = Rounding("e5m2", scaling, history, tile)

    def forward(self, x: Tensor) -> Tensor:
        roundings = self.round_x, self.round_w, self.round_dy
        y: Tensor = _Fp8Linear.apply(x, self.weight, *roundings)  # type: ignore[no-untyped-call]
        return y


def use_fp8(module: nn.Module, scaling: Scaling = "delayed", history: int = 16, block: int = 128) -> None:
    """Replace, in place, every `Linear` without bias inside `module` by an `Fp8Linear` with the same weight.

    Use it on the blocks of a model. The head and an MoE layer's router are best left in their own precision.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Linear and child.bias is None:
                setattr(parent, name, Fp8Linear(child.weight, scaling, history, block))
