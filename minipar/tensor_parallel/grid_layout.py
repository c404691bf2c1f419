"""A whole model on a grid or a cube of ranks: the block of each activation that a rank holds, and the products.

    2D, 2.5D   activations [B, T, D]                             samples over the d q rows, features over the q columns
    3D         in the residual stream                            samples over (i, j), features over l
               inside a block, after q, k and v, or gate and up  samples over (i, l), features over j

Samples and heads are whole on their rank. So attention, RoPE, activation functions and the residual send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.errors import require_divides
from minipar.tensor_parallel.cube import Cube, CubeLinear, cube_linear, place_on_cube
from minipar.tensor_parallel.grid import Grid, SummaLinear, place_on_grid, summa


class Blocks(NamedTuple):
    """The blocks of an activation [B, T, D]: this rank's has chunk `stack.rank` of B and chunk `line.rank` of D.

    line   the ranks with the same samples: each has other features
    stack  the ranks with the same features: each has other samples
    """

    line: Comm
    stack: Comm

    def samples(self, x: Tensor) -> Tensor:
        """Return this rank's samples of x [B, ...]. Raises ValueError where B cannot be split evenly."""
        require_divides("the rows of ranks", self.stack.size, "samples", x.shape[0])
        return x.chunk(self.stack.size)[self.stack.rank]

    def whole_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the activation of which x is a block."""
        return (x.shape[0] * self.stack.size, *x.shape[1:-1], x.shape[-1] * self.line.size)


class GridLayout:
    """2D, and 2.5D where depth > 1.

    outer, inner  blocks of the residual stream, and of what is inside a block: here the same
    """

    def __init__(self, comm, depth: int = 1):
        self.grid = Grid(comm, depth)
        self.outer = self.inner = Blocks(self.grid.row, self.grid.same_j)

    def expand(self, linear: nn.Module) -> SummaLinear:
        """Split a linear layer whose input is cut as `outer` and whose output as `inner`."""
        return SummaLinear.on_grid(linear, self.grid)

    def contract(self, linear: nn.Module) -> SummaLinear:
        """Split a linear layer whose input is cut as `inner` and whose output as `outer`."""
        return SummaLinear.on_grid(linear, self.grid)

    def multiply(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Multiply one input by several weights, split as `expand` splits."""
        return summa(self.grid, x, weights)

    def weight_block(self, weight: nn.Parameter) -> nn.Parameter:
        """Return this rank's block of a whole weight [F, D] that `multiply` is to multiply by."""
        return place_on_grid(self.grid, weight)

    def gather_table(self, weight: Tensor) -> Tensor:
        """Return all rows of an embedding [V, D], with this rank's features: [V, D/q].

        weight  [V/q, D/q]   `weight_block`, so that a tied head multiplies by it

        Rank (i, j) exchanges its block with rank (j, i), then all-gathers the column. Backward: the reverse. Sends q |w|
        elements forward, |w| fewer where i = j, and as many backward, and 2(d-1)/d |w| for the sum over layers.
        """
        at = self.grid
        partner = (at.layer * at.q + at.j) * at.q + at.i
        block = _Swap.apply(autograd.copy(at.depth, weight), at.comm, partner)
        return autograd.all_gather(at.column, block)


class _Swap(torch.autograd.Function):
    """Exchange a tensor with a partner, which calls this too. Backward: exchange the gradients."""

    @staticmethod
    def forward(ctx, x, comm, partner):
        ctx.comm, ctx.partner = comm, partner
        return comm.exchange(x.contiguous(), partner, x.shape, x.dtype, partner)

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.comm.exchange(dy.contiguous(), ctx.partner, dy.shape, dy.dtype, ctx.partner)
        return dx, None, None


class CubeLayout:
    """3D. Methods as in `GridLayout`."""

    def __init__(self, comm):
        self.plain, self.turned = Cube(comm), Cube(comm, swap_jl=True)
        self.outer = Blocks(self.plain.along_l, self.turned.same_j)
        self.inner = Blocks(self.plain.along_j, self.plain.same_j)

    def expand(self, linear: nn.Module) -> CubeLinear:
        return CubeLinear.on_cube(linear, self.plain)

    def contract(self, linear: nn.Module) -> CubeLinear:
        return CubeLinear.on_cube(linear, self.turned)

    def multiply(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return cube_linear(self.plain, x, weights)

    def weight_block(self, weight: nn.Parameter) -> nn.Parameter:
        return place_on_cube(self.plain, weight)

    def gather_table(self, weight: Tensor) -> Tensor:
        """Return all rows of an embedding [V, D], with this rank's features l: [V, D/p].

        weight  [V/p^2, D/p]   `weight_block`: rows (j, i), features l

        All-gathers over the p^2 ranks of equal l. Sends (p^2 - 1) |w| elements forward, and as many backward.
        """
        p, blocks = self.plain.p, autograd.all_gather(self.outer.stack, weight)
        return blocks.unflatten(0, (p, p, -1)).transpose(0, 1).flatten(0, 2)


def make_layout(comm, layout: str, depth: int = 1) -> GridLayout | CubeLayout:
    """Arrange the ranks of `comm` as layout "2d", "2.5d" or "3d" says."""
    return CubeLayout(comm) if layout == "3d" else GridLayout(comm, depth)
