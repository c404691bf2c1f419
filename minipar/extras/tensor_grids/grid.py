"""Linear layers on a grid of ranks: weights and activations are split along both dims, so no rank holds a full matrix.

    SummaLinear            q x q ranks                 2D: blocks of x are broadcast along rows, blocks of w along columns
    SummaLinear, depth d   d layers of q x q ranks     2.5D: each layer has some rows of x and its own copy of w

    y(i, j) = sum_k x(i, k) w(j, k)^T         rank (i, k) holds x(i, k); rank (k, j) holds w(j, k); k: input features

In step k, rank (i, k) broadcasts x(i, k) to its row and rank (k, j) broadcasts w(j, k) to its column. In contrast to 1D
tensor parallelism, no activation is replicated, and a rank sends less as q grows. But a rank sends weights as well as
activations, in 6 q broadcasts and reductions instead of one all-reduce.

Source: van de Geijn and Watts, SUMMA, 1997; Xu et al. (Optimus), arXiv:2104.05343; Wang et al. (Tesseract, 2.5D),
arXiv:2105.14500.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.mesh import Placement, place_whole, placement_of
from minipar.model import autocast
from minipar.model.deferrable_linear import Linear
from minipar.support.errors import require_divides
from minipar.tensor_parallel.shards import place

AnyLinear = nn.Linear | Linear


class Grid:
    """The coordinates of rank = (layer * q + i) * q + j in d layers of q x q ranks, and the Comms of its lines and planes.

    comm     all ranks
    row      ranks (layer, i, *)     depth    ranks (*, i, j)
    column   ranks (layer, *, j)     same_j   ranks (*, *, j)

    Raises ValueError if the number of ranks is not depth times a square.
    """

    def __init__(self, comm: Comm, depth: int = 1):
        require_divides("depth", depth, "tp", comm.size)
        self.q, self.d = isqrt(comm.size // depth), depth
        if self.q**2 * depth != comm.size:
            squares = ", ".join(str(n * n * depth) for n in range(1, 5))
            raise ValueError(f"tp={comm.size} is not depth={depth} times a square; use {squares} ...")
        q, self.comm = self.q, comm
        self.layer, self.i, self.j = comm.rank // q**2, comm.rank // q % q, comm.rank % q
        first = self.layer * q**2
        self.row = comm.subgroup([first + self.i * q + j for j in range(q)], "row")
        self.column = comm.subgroup([first + i * q + self.j for i in range(q)], "column")
        self.depth = comm.subgroup([self.i * q + self.j + n * q**2 for n in range(depth)], "depth")
        self.same_j = comm.subgroup([n * q + self.j for n in range(depth * q)], "same j")


def summa(grid: Grid, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute this rank's blocks of y_n = x w_n^T. x is sent once for all weights.

    x    [..., D/q]      M/(dq) rows: block (layer q + i, j)
    w_n  [F_n/q, D/q]    block (j, i) of [F_n, D], the same in each layer
    y_n  [..., F_n/q]    block (layer q + i, j)

    backward   dx(i, k) = sum_n sum_j dy_n(i, j) w_n(j, k)     w broadcast down columns, sums reduced along rows
               dw_n(j, k) = sum_i dy_n(i, j)^T x(i, k)         x broadcast along rows, sums reduced up columns, then over
                                                               layers

    Sends (q-1) (|x| + |w|) elements forward, and 2 (q-1) (|x| + |w|) backward plus 2(d-1)/d |w| for the sum over layers.
    |x| and |w| are the elements of this rank's blocks, summed over all weights.
    """
    x, *weights = autocast.cast(x, *weights)
    ys = _Summa.apply(x.flatten(0, -2), grid, *weights)  # type: ignore[no-untyped-call]
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys)


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.grid = grid
        ctx.save_for_backward(x, *weights)
        ys = [x.new_zeros(x.shape[0], weight.shape[0]) for weight in weights]
        for k in range(grid.q):
            block = _broadcast_block(grid.row, x, k)
            for y, weight in zip(ys, weights):
                y += F.linear(block, _broadcast_block(grid.column, weight, k))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        grid, (x, *weights) = ctx.grid, ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * len(weights)
        for k in range(grid.q):
            if needs_dx:
                term = sum(dy @ _broadcast_block(grid.column, w, k) for dy, w in zip(dys, weights))
                dx = _not_none(grid.row.reduce(term, root=k, algorithm="tree"), dx)
            if any(needs_dw):
                block = _broadcast_block(grid.row, x, k)
            for n in (n for n, needed in enumerate(needs_dw) if needed):
                term = dys[n].t() @ block
                dws[n] = _not_none(grid.column.reduce(term, root=k, algorithm="tree"), dws[n])
        return dx, None, *(None if dw is None else grid.depth.all_reduce_(dw) for dw in dws)


def _broadcast_block(line: Comm, block: Tensor, k: int) -> Tensor:
    """Broadcast the block of the line's k-th rank to every rank of the line."""
    received: Tensor = line.broadcast(block, root=k, algorithm="tree")
    return received


def _not_none(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a


def place_on_grid(grid: Grid, weight: nn.Parameter) -> nn.Parameter:
    """Return block (j, i) of an unsharded weight [F, D]: [F/q, D/q]."""
    block = placement_of(weight).shard(0, grid.j, grid.q).shard(1, grid.i, grid.q)
    return place(weight, block.replicate("tp") if grid.d > 1 else block)


class SummaLinear(nn.Module):
    """y = x w^T + b on a grid: x [..., D/q] -> y [..., F/q], with M/(dq) of the M rows on each rank.

    x and y are split the same way, so y can be the next layer's input. Costs what `summa` costs, plus an all-reduce of b's
    gradient [F/q] over the ranks with the same j.
    Raises ValueError if q does not divide D or F.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, grid: Grid):
        super().__init__()
        self.weight, self.grid = weight, grid
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: AnyLinear, comm: Comm, depth: int = 1) -> SummaLinear:
        """Keep this rank's block of `linear`, an unsharded layer that is the same on every rank."""
        return cls.on_grid(linear, Grid(comm, depth))

    @classmethod
    def on_grid(cls, linear: AnyLinear, grid: Grid) -> SummaLinear:
        """Keep this rank's block of `linear`, as `from_linear` does, on a grid that several layers share."""
        for dim, name in enumerate(("out_features", "in_features")):
            require_divides("q", grid.q, name, linear.weight.shape[dim])
        place_whole(linear)
        weight, bias = place_on_grid(grid, linear.get_parameter("weight")), linear.bias
        if bias is not None:
            bias = place(bias, placement_of(bias).shard(0, grid.j, grid.q).replicate("tp"))
        return cls(weight, bias, grid)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = summa(self.grid, x, [self.weight])
        return self.add_bias(y)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + autograd.copy(self.grid.same_j, self.bias)

    def activation(self, rows: int, features: int) -> Placement:
        """Return the placement of this rank's block of an input or output [rows, features]."""
        q, whole = self.grid.q, Placement.whole("activation", (rows, features))
        return whole.shard(0, self.grid.layer * q + self.grid.i, self.grid.d * q).shard(1, self.grid.j, q)
