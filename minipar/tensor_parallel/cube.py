"""A linear layer on a cube of p x p x p ranks: rows, output and input features are each split along one axis of the cube.

    y(i, j) = sum_l x(i, l) w(j, l)^T         rank (i, j, l) computes term l of y(i, j)

x is all-gathered along j, w along i, and the terms are reduce-scattered along l; between products every matrix is sharded
over all p^3 ranks. One all-gather or reduce-scatter per matrix, each over p = cuberoot(tp) ranks.

Source: Agarwal et al., A three-dimensional approach to parallel matrix multiplication, 1995; Bian et al.,
arXiv:2105.14450.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import autograd
from minipar.errors import require_divides
from minipar.mesh import Placement, place_whole, placement_of
from minipar.tensor_parallel.shards import place


class Cube:
    """Coordinates of rank = (i * p + j) * p + l, and the Comms of the ranks that differ in i, j or l alone.

    same_j   the Comm of all ranks of equal j
    turned   swap the roles of j and l: a plain layer's output features, split along j, are then split along l
    Raises ValueError where the number of ranks is not a cube.
    """

    def __init__(self, comm, swap_jl: bool = False):
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


def cube_linear(cube: Cube, x: Tensor, weight: Tensor) -> Tensor:
    """Compute this rank's block of y = x w^T.

    x       [M/p^2, D/p]   rows (i, j), features l
    weight  [F/p^2, D/p]   rows (j, i), features l
    y       [M/p^2, F/p]   rows (i, l), features j

    forward    y  = scatter_l(gather_j(x) gather_i(w)^T)
    backward   dx = scatter_j(gather_l(dy) gather_i(w))       dw = scatter_i(gather_l(dy)^T gather_j(x))

    Sends (p-1) (|x| + |w| + |y|) elements forward and (p-1) (2|x| + 2|w| + |y|) backward, with |x|, |w|, |y| the
    elements of this rank's blocks. Only the blocks are saved, so backward gathers x and w again.
    """
    return _CubeLinear.apply(x, weight, cube)


class _CubeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cube):
        ctx.cube = cube
        ctx.save_for_backward(x, weight)
        return cube.along_l.reduce_scatter(
            F.linear(cube.along_j.all_gather(x), cube.along_i.all_gather(weight))
        )

    @staticmethod
    def backward(ctx, dy):
        cube, (x, weight) = ctx.cube, ctx.saved_tensors
        dx = dw = None
        dy = cube.along_l.all_gather(dy)
        if ctx.needs_input_grad[0]:
            dx = cube.along_j.reduce_scatter(dy @ cube.along_i.all_gather(weight))
        if ctx.needs_input_grad[1]:
            dw = cube.along_i.reduce_scatter(dy.t() @ cube.along_j.all_gather(x))
        return dx, dw, None


class CubeLinear(nn.Module):
    """y = x w^T + b on a cube: x [M/p^2, D/p] -> y [M/p^2, F/p]; a `swap_jl` layer's input is a plain layer's output.

    Costs: `cube_linear`, and an all-reduce of b's gradient [F/p] over the ranks of equal j.
    Raises ValueError where p^2 does not divide F, or p does not divide D.
    """

    def __init__(self, weight, bias, cube: Cube):
        super().__init__()
        self.weight, self.cube = weight, cube
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear, comm, swap_jl: bool = False) -> CubeLinear:
        """Keep this rank's block of `linear`, a whole layer that is the same on every rank."""
        cube = Cube(comm, swap_jl)
        p = cube.p
        require_divides("p^2", p**2, "out_features", linear.weight.shape[0])
        require_divides("p", p, "in_features", linear.weight.shape[1])
        place_whole(linear)
        block = placement_of(linear.weight).shard(0, cube.j, p).shard(0, cube.i, p).shard(1, cube.l, p)
        bias = linear.bias
        if bias is not None:
            bias = place(bias, placement_of(bias).shard(0, cube.j, p).replicate("tp"))
        return cls(place(linear.weight, block), bias, cube)

    def forward(self, x: Tensor) -> Tensor:
        y = cube_linear(self.cube, x, self.weight)
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
