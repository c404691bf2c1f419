"""Layouts of the model on a grid or a cube of ranks: the block of each activation on a rank, and the matrix products.

    2D, 2.5D   activations [B, T, D]                             samples over the d q rows, features over the q columns
    3D         in the residual stream                            samples over (i, j), features over l
               in a layer, after q, k and v, or gate and up      samples over (i, l), features over j

No sample and no head is split over ranks. So attention, RoPE, activation functions and the residual send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.extras.tensor_grids.cube import Cube, CubeLinear, cube_linear, place_on_cube
from minipar.extras.tensor_grids.grid import AnyLinear, Grid, SummaLinear, place_on_grid, summa
from minipar.support.errors import require_divides


class Blocks(NamedTuple):
    """A split of activations [B, T, D]: this rank's block has chunk `stack.rank` of B and chunk `line.rank` of D.

    line   the ranks with the same samples and different features
    stack  the ranks with the same features and different samples
    """

    line: Comm
    stack: Comm

    def samples(self, x: Tensor) -> Tensor:
        """Return this rank's samples of x [B, ...]. Raises ValueError if B cannot be split evenly."""
        require_divides("the rows of ranks", self.stack.size, "samples", x.shape[0])
        return x.chunk(self.stack.size)[self.stack.rank]

    def whole_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the full activation, given its block x."""
        return (x.shape[0] * self.stack.size, *x.shape[1:-1], x.shape[-1] * self.line.size)


class GridLayout:
    """The layout on a 2D grid of ranks, or on a 2.5D grid if depth > 1.

    outer  how activations of the residual stream are split
    inner  how activations between an `expand` and a `contract` layer are split; on a grid, like `outer`
    """

    def __init__(self, comm: Comm, depth: int = 1):
        self.grid = Grid(comm, depth)
        self.outer = self.inner = Blocks(self.grid.row, self.grid.same_j)

    def expand(self, linear: AnyLinear) -> SummaLinear:
        """Split a linear layer whose input is split as `outer` and whose output is split as `inner`."""
        return SummaLinear.on_grid(linear, self.grid)

    def contract(self, linear: AnyLinear) -> SummaLinear:
        """Split a linear layer whose input is split as `inner` and whose output is split as `outer`."""
        return SummaLinear.on_grid(linear, self.grid)

    def multiply(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Multiply one input by several weights, which are split as by `expand`."""
        return summa(self.grid, x, weights)

    def weight_block(self, weight: nn.Parameter) -> nn.Parameter:
        """Return this rank's block of an unsharded weight [F, D], for `multiply`."""
        return place_on_grid(self.grid, weight)

    def gather_table(self, weight: Tensor) -> Tensor:
        """Return all rows of an embedding [V, D], with this rank's features: [V, D/q].

        weight  [V/q, D/q]   from `weight_block`, so that a tied head can multiply by it

        Rank (i, j) exchanges its block with rank (j, i), then all-gathers over its column. Backward: the reverse. Sends
        q |w| elements forward (|w| fewer if i = j) and as many backward, plus 2(d-1)/d |w| for the sum over the d layers.
        """
        at = self.grid
        partner = (at.layer * at.q + at.j) * at.q + at.i
        block = _Swap.apply(autograd.copy(at.depth, weight), at.comm, partner)  # type: ignore[no-untyped-call]
        return autograd.all_gather(at.column, block)


class _Swap(torch.autograd.Function):
    """Exchange a tensor with a partner rank, which must call this, too. Backward: exchange the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, partner: int) -> Tensor:
        ctx.comm, ctx.partner = comm, partner
        received: Tensor = comm.exchange(x.contiguous(), partner, x.shape, x.dtype, partner)
        return received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = ctx.comm.exchange(dy.contiguous(), ctx.partner, dy.shape, dy.dtype, ctx.partner)
        return dx, None, None


class CubeLayout:
    """The layout on a 3D cube of ranks; the methods are as in `GridLayout`."""

    def __init__(self, comm: Comm):
        self.plain, self.turned = Cube(comm), Cube(comm, swap_jl=True)
        self.outer = Blocks(self.plain.along_l, self.turned.same_j)
        self.inner = Blocks(self.plain.along_j, self.plain.same_j)

    def expand(self, linear: AnyLinear) -> CubeLinear:
        return CubeLinear.on_cube(linear, self.plain)

    def contract(self, linear: AnyLinear) -> CubeLinear:
        return CubeLinear.on_cube(linear, self.turned)

    def multiply(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return cube_linear(self.plain, x, weights)

    def weight_block(self, weight: nn.Parameter) -> nn.Parameter:
        return place_on_cube(self.plain, weight)

    def gather_table(self, weight: Tensor) -> Tensor:
        """Return all rows of an embedding [V, D], with this rank's features l: [V, D/p].

        weight  [V/p^2, D/p]   from `weight_block`: rows (j, i), features l

        All-gathers over the p^2 ranks with the same l. Sends (p^2 - 1) |w| elements forward, and as many backward.
        """
        p, blocks = self.plain.p, autograd.all_gather(self.outer.stack, weight)
        return torch.unflatten(blocks, 0, (p, p, -1)).transpose(0, 1).flatten(0, 2)


def make_layout(comm: Comm, layout: str, depth: int = 1) -> GridLayout | CubeLayout:
    """Arrange the ranks of `comm` in the layout "2d", "2.5d" or "3d"."""
    return CubeLayout(comm) if layout == "3d" else GridLayout(comm, depth)
