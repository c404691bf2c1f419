"""The two ways to cut a matrix in a linear layer, and why they come in pairs.

    column parallel   y = x w^T, w split by output features: each rank has its own features of y
    row parallel      y = x w^T, w split by input features: each rank has a term of the sum that is y

A column-parallel layer, anything that works feature by feature, and a row-parallel layer follow one another without a
word between ranks; one all-reduce at the end forward, one at the beginning backward.

`linear(copy(x), w)` is column parallelism in five words, and `column_parallel` computes the same: it treats all the
matrices that one input meets (q, k and v) together, so that there is one sum of dx for them and not three, and lets that
sum travel while the weights' gradients are computed.

Source: Megatron-LM, arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2, for the sequence-parallel form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import differentiable
from minipar.errors import require_divides
from minipar.model.linear import WeightGradients, accumulate_gradient, linear
from minipar.placement import Placement, place_whole, placement_of, set_placement
from minipar.tensor_parallel.sequence import (
    reduce_scatter_tokens,
    start_gather_tokens,
    start_reduce_scatter_tokens,
)


class Matrix(NamedTuple):
    """A weight [F/tp, D] that an input meets.

    deferred   None, or where the backward puts the product that is the weight's gradient
    replicas   None, or the Comm of the ranks that hold this same shard, over which its gradient is summed
    """

    weight: Tensor
    deferred: WeightGradients | None = None
    replicas: object = None

    @property
    def waits(self) -> bool:
        return self.deferred is not None and self.weight.requires_grad and self.weight.is_leaf


def column_parallel(
    comm, x: Tensor, matrices: Sequence[Matrix], tokens_split: bool = False
) -> tuple[Tensor, ...]:
    """Multiply one input by several weights whose output features are split over `comm`: y_i = x w_i^T.

    x    [B, T, D]          the same on every rank; where `tokens_split`, this rank's [B, T/tp, D]
    w_i  [F_i/tp, D]        rows r*F_i/tp ... of the full weight
    y_i  [B, T, F_i/tp]     each rank has its own features

    backward   dx = sum over ranks of sum_i dy_i w_i    one all-reduce (reduce-scatter), under way while
               dw_i = dy_i^T x                          are computed, or deferred

    Sends 2(tp-1)/tp * B*T*D elements backward. Where `tokens_split`: (tp-1)/tp * B*T*D forward, to gather x, and twice
    that backward, since only the shard of x is kept: it is gathered again while dx is computed. And 2(g-1)/g * |w_i|
    for the gradient of a w_i that g ranks hold. A deferred product keeps the gathered x.
    """
    visible = [None if m.waits else m.weight for m in matrices]
    waiting = [m.deferred for m in matrices if m.waits]
    anchor = None if x.requires_grad or not waiting else waiting[0].anchor
    return _ColumnParallel.apply(x, comm, matrices, tokens_split, anchor, *visible)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, matrices, tokens_split, anchor, *visible):
        ctx.comm, ctx.matrices, ctx.tokens_split = comm, matrices, tokens_split
        ctx.trains = [m.waits or needed for m, needed in zip(matrices, ctx.needs_input_grad[5:])]
        ctx.save_for_backward(x if any(ctx.trains) else None, *(m.weight for m in matrices))
        whole = start_gather_tokens(comm, x)() if tokens_split else x
        return tuple(F.linear(whole, m.weight) for m in matrices)

    @staticmethod
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        regather = ctx.tokens_split and any(ctx.trains)
        whole = start_gather_tokens(ctx.comm, x) if regather else lambda: x
        finish_dx = _start_dx(ctx, dys, weights) if ctx.needs_input_grad[0] else lambda: None
        x = whole()
        finish_dws = [
            _start_dw(m, dy, x) if trains else lambda: None
            for m, dy, trains in zip(ctx.matrices, dys, ctx.trains)
        ]
        return finish_dx(), None, None, None, None, *(finish() for finish in finish_dws)


def _start_dx(ctx, dys, weights) -> Callable[[], Tensor]:
    """Begin to sum dx over ranks."""
    dx = _rows(dys[0]) @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:]):
        dx.addmm_(_rows(dy), weight)
    dx = dx.view(*dys[0].shape[:-1], -1)
    if ctx.tokens_split:
        return start_reduce_scatter_tokens(ctx.comm, dx)
    return ctx.comm.all_reduce_(dx, async_op=True).wait  # in place: dx is nobody else's


def _start_dw(matrix: Matrix, dy: Tensor, x: Tensor) -> Callable[[], Tensor | None]:
    """Compute dw and begin to sum it over the replicas, or put that off."""
    if matrix.waits:
        matrix.deferred.put(partial(_add_later, matrix, dy, x))
        return lambda: None
    dw = _weight_gradient(dy, x)
    return (lambda: dw) if matrix.replicas is None else matrix.replicas.all_reduce_(dw, async_op=True).wait


@torch.no_grad()
def _add_later(matrix: Matrix, dy: Tensor, x: Tensor) -> None:
    dw = _weight_gradient(dy, x)
    if matrix.replicas is not None:
        matrix.replicas.all_reduce_(dw)
    accumulate_gradient(matrix.weight, dw)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return _rows(dy).t() @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class ColumnParallelLinear(nn.Module):
    """A linear layer's output features r*F/tp ... : y = x w^T + b.

    x  [B, T, D] on every rank    w  [F/tp, D]    b  [F/tp]    y  [B, T, F/tp]; with `gather_output` [B, T, F]

    num_shards    into how many parts the features are cut, tp unless told; where fewer, tp/num_shards neighbouring
                  ranks hold each, and its gradient is summed over them
    tokens_split  x is this rank's tokens [B, T/tp, D], gathered here
    uneven        the features may be cut as torch.chunk cuts; the output is then not to be gathered

    Costs: `column_parallel`; gathering the output sends (tp-1)/tp * B*T*F elements more.
    Raises ValueError where num_shards does not divide F, unless `uneven`.
    """

    deferred: WeightGradients | None = None

    def __init__(self, weight, bias, comm, gather_output=False, tokens_split=False, replicas=None):
        super().__init__()
        self.weight, self.comm = weight, comm
        self.register_parameter("bias", bias)
        self.gather_output, self.tokens_split, self.replicas = gather_output, tokens_split, replicas

    @classmethod
    def from_linear(
        cls,
        linear,
        comm,
        gather_output: bool = False,
        tokens_split: bool = False,
        num_shards: int | None = None,
        uneven: bool = False,
    ) -> ColumnParallelLinear:
        """Cut this rank's part out of a whole layer, the same on every rank."""
        num_shards = num_shards or comm.size
        if not uneven:
            what = "tp" if num_shards == comm.size else "num_shards"
            require_divides(what, num_shards, "out_features", linear.weight.shape[0])
        require_divides("num_shards", num_shards, "tp", comm.size)
        place_whole(linear)
        holders = comm.size // num_shards
        index = comm.rank // holders
        cut = partial(cut_parameter, dim=0, index=index, count=num_shards, copies=holders > 1)
        ranks = range(index * holders, (index + 1) * holders)
        replicas = comm.subgroup(ranks, "replicas") if holders > 1 else None
        bias = None if linear.bias is None else cut(linear.bias)
        return cls(cut(linear.weight), bias, comm, gather_output, tokens_split, replicas)

    def matrix(self) -> Matrix:
        return Matrix(self.weight, self.deferred, self.replicas)

    def add_bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        return y + (self.bias if self.replicas is None else differentiable.copy(self.replicas, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        (y,) = project_together((self,), x)
        return differentiable.gather(self.comm, y, dim=-1) if self.gather_output else y


def project_together(layers: Sequence[ColumnParallelLinear], x: Tensor) -> tuple[Tensor, ...]:
    """What several column-parallel layers make of one input: one copy operator, so one sum of dx, for all."""
    first = layers[0]
    ys = column_parallel(first.comm, x, [layer.matrix() for layer in layers], first.tokens_split)
    return tuple(layer.add_bias(y) for layer, y in zip(layers, ys))


class RowParallelLinear(nn.Module):
    """A linear layer's input features r*D/tp ... : y = sum over ranks of x w^T, + b once.

    x  [B, T, D/tp]; [B, T, D] where not `input_is_parallel`    w  [F, D/tp]    b  [F] on every rank
    y  [B, T, F] on every rank; with `split_tokens` this rank's tokens [B, T/tp, F]

    backward   dx = dy w, dw = dy^T x    local; with `split_tokens`, dy is gathered

    Sends 2(tp-1)/tp * B*T*F elements forward; with `split_tokens` half of it forward, half backward. Splitting the
    input gathers its gradient: (tp-1)/tp * B*T*D more backward.
    Raises ValueError where tp does not divide D.
    """

    deferred: WeightGradients | None = None

    def __init__(self, weight, bias, comm, input_is_parallel=True, split_tokens=False):
        super().__init__()
        self.weight, self.comm = weight, comm
        self.register_parameter("bias", bias)
        self.input_is_parallel, self.split_tokens = input_is_parallel, split_tokens

    @classmethod
    def from_linear(
        cls, linear, comm, input_is_parallel: bool = True, split_tokens: bool = False
    ) -> RowParallelLinear:
        """Cut this rank's part out of a whole layer, the same on every rank."""
        require_divides("tp", comm.size, "in_features", linear.weight.shape[1])
        place_whole(linear)
        weight = cut_parameter(linear.weight, 1, comm.rank, comm.size)
        bias = None if linear.bias is None else replicate_parameter(linear.bias)
        return cls(weight, bias, comm, input_is_parallel, split_tokens)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = differentiable.split(self.comm, x, dim=-1)
        partial_sum = linear(x, self.weight, None, self.deferred)
        if self.split_tokens:
            y = reduce_scatter_tokens(self.comm, partial_sum)
        else:
            y = differentiable.all_reduce(self.comm, partial_sum)
        return y if self.bias is None else y + self._shared_bias()

    def _shared_bias(self) -> Tensor:
        # Added to this rank's tokens alone, its gradient is a part of the sum.
        return differentiable.copy(self.comm, self.bias) if self.split_tokens else self.bias


def cut_parameter(parameter, dim: int, index: int, count: int, copies: bool = False) -> nn.Parameter:
    """Chunk `index` of `count` as a parameter of its own; `copies`: other ranks of tp hold it too."""
    placement = placement_of(parameter).shard(dim, index, count)
    return place(parameter, placement.replicate("tp") if copies else placement)


def replicate_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, marked as held whole by every rank of tp."""
    set_placement(parameter, placement_of(parameter).replicate("tp"))
    return parameter


def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """The part of a whole parameter that `placement` names, in memory of its own."""
    part = nn.Parameter(placement.slice_of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    set_placement(part, placement)
    return part
