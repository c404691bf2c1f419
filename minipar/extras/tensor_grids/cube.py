"""A linear layer on a cube of p x p x p ranks: rows, output and input features are each split along one axis of the cube.

    y(i, j) = sum_l x(i, l) w(j, l)^T         rank (i, j, l) computes term l of y(i, j)

x is all-gathered along j and w along i, and the terms are reduce-scattered along l. Between products every matrix is
sharded over all p^3 ranks. So each of x, w and y takes one all-gather or reduce-scatter, over p = cuberoot(tp) ranks.

Source: Agarwal et al., A three-dimensional approach to parallel matrix multiplication, 1995; Bian et al.,
arXiv:2105.14450.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.extras.tensor_grids.grid import AnyLinear
from minipar.mesh import Placement, place_whole, placement_of
from minipar.model import autocast
from minipar.support.errors import require_divides
from minipar.tensor_parallel.shards import place


class Cube:
    """The coordinates of rank = (i * p + j) * p + l, and the Comms along i, j and l.

    along_i  the Comm of the ranks that differ from this one only in i; along_j and along_l likewise
    same_j   the Comm of all ranks with the same j
    swap_jl  whether j and l exchange their roles: output features are then split along l instead of j

    Raises ValueError if the number of ranks is not a cube.
    """

    def __init__(self, comm: Comm, swap_jl: bool = False):
        p = self.p = round(comm.size ** (1 / 3))
        if p**3 != comm.size:
            raise ValueError(f"tp={comm.size} is not a cube; use 1, 8, 27 ...")
        i, j, l = comm.rank // p**2, comm.rank // p % p, comm.rank % p
        step_j, step_l = (1, p) if swap_jl else (p, 1)
        self.i, self.j, self.l = (i, l, j) if swap_jl else (i, j, l)
        line = range(p)
        here = comm.rank
        self.along_i = comm.subgroup([here + (n - self.i) * p**2 for n in line], "i")
        self.along_j = comm.subgroup([here + (n - self.j) * step_j for n in line], "l" if swap_jl else "j")
        self.along_l = comm.subgroup([here + (n - self.l) * step_l for n in line], "j" if swap_jl else "l")
        plane = [n * p**2 + m * step_l + self.j * step_j for n in line for m in line]
        self.same_j = comm.subgroup(plane, "same l" if swap_jl else "same j")


def cube_linear(cube: Cube, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute this rank's blocks of y_n = x w_n^T. x is gathered once for all weights.

    x    [..., D/p]         M/p^2 rows (i, j), features l
    w_n  [F_n/p^2, D/p]     rows (j, i), features l
    y_n  [..., F_n/p]       M/p^2 rows (i, l), features j

    forward    y_n = scatter_l(gather_j(x) gather_i(w_n)^T)
    backward   dx = scatter_j(sum_n gather_l(dy_n) gather_i(w_n))       dw_n = scatter_i(gather_l(dy_n)^T gather_j(x))

    Sends (p-1) (|x| + |w| + |y|) elements forward and (p-1) (2|x| + 2|w| + |y|) backward. |x|, |w| and |y| are the elements
    of this rank's blocks, summed over all weights. Only the blocks are saved, so the backward gathers x and w again.
    """
    x, *weights = autocast.cast(x, *weights)
    ys = _CubeLinear.apply(x.flatten(0, -2), cube, *weights)  # type: ignore[no-untyped-call]
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys)


class _CubeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cube: Cube, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.cube = cube
        ctx.save_for_backward(x, *weights)
        x = cube.along_j.all_gather(x)
        return tuple(
            cube.along_l.reduce_scatter(F.linear(x, cube.along_i.all_gather(weight))) for weight in weights
        )

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        cube, (x, *weights) = ctx.cube, ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        dys_of_line = [cube.along_l.all_gather(dy) for dy in dys]
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * len(weights)
        if needs_dx:
            terms = (dy @ cube.along_i.all_gather(weight) for dy, weight in zip(dys_of_line, weights))
            dx = cube.along_j.reduce_scatter(sum(terms))
        if any(needs_dw):
            x_of_line = cube.along_j.all_gather(x)
        for n in (n for n, needed in enumerate(needs_dw) if needed):
            dws[n] = cube.along_i.reduce_scatter(dys_of_line[n].t() @ x_of_line)
        return dx, None, *dws


def place_on_cube(cube: Cube, weight: nn.Parameter) -> nn.Parameter:
    """Return this rank's block of an unsharded weight [F, D]: rows (j, i) and features l, [F/p^2, D/p]."""
    p = cube.p
    return place(weight, placement_of(weight).shard(0, cube.j, p).shard(0, cube.i, p).shard(1, cube.l, p))


class CubeLinear(nn.Module):
    """y = x w^T + b on a cube: x [..., D/p] -> y [..., F/p], with M/p^2 of the M rows on each rank.

    The output of a plain layer can be the input of a `swap_jl` layer. Costs what `cube_linear` costs, plus an all-reduce of
    b's gradient [F/p] over the ranks with the same j.
    Raises ValueError if p^2 does not divide F, or p does not divide D.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, cube: Cube):
        super().__init__()
        self.weight, self.cube = weight, cube
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear: AnyLinear, comm: Comm, swap_jl: bool = False) -> CubeLinear:
        """Keep this rank's block of `linear`, an unsharded layer that is the same on every rank."""
        return cls.on_cube(linear, Cube(comm, swap_jl))

    @classmethod
    def on_cube(cls, linear: AnyLinear, cube: Cube) -> CubeLinear:
        """Keep this rank's block of `linear`, as `from_linear` does, on a cube that several layers share."""
        p = cube.p
        require_divides("p^2", p**2, "out_features", linear.weight.shape[0])
        require_divides("p", p, "in_features", linear.weight.shape[1])
        place_whole(linear)
        weight, bias = place_on_cube(cube, linear.get_parameter("weight")), linear.bias
        if bias is not None:
            bias = place(bias, placement_of(bias).shard(0, cube.j, p).replicate("tp"))
        return cls(weight, bias, cube)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = cube_linear(self.cube, x, [self.weight])
        return self.add_bias(y)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + autograd.copy(self.cube.same_j, self.bias)

    def input(self, rows: int, features: int) -> Placement:
        """Return the placement of this rank's block of the input [rows, features]."""
        return self._block(rows, features, self.cube.j, self.cube.l)

    def output(self, rows: int, features: int) -> Placement:
        """Return the placement of this rank's block of the output [rows, features]."""
        return self._block(rows, features, self.cube.l, self.cube.j)

    def _block(self, rows: int, features: int, inner: int, feature: int) -> Placement:
        p, whole = self.cube.p, Placement.whole("activation", (rows, features))
        return whole.shard(0, self.cube.i, p).shard(0, inner, p).shard(1, feature, p)
