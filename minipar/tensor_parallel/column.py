"""Column-parallel products of one input and several weights: y_i = x w_i^T, output features split over ranks.

Adds to `simple/tensor_parallel.py`: one sum of dx for all weights of an input, overlapped with the weight gradients;
deferred weight gradients; shards that several ranks hold.

`column_parallel` computes `linear(copy(x), w)` for each weight. It takes all weights that multiply one input (q, k and v)
together, so that dx is summed over ranks once instead of three times, while the weight gradients are computed.

Source: Megatron-LM, arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2, for the sequence-parallel form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.comm.transport.stream import Pending
from minipar.model import autocast
from minipar.model.deferrable_linear import WeightGradients, accumulate_gradient
from minipar.model.products import PLAIN, Products
from minipar.tensor_parallel.sequence import start_gather_tokens, start_reduce_scatter_tokens


class ShardedWeight(NamedTuple):
    """A weight [F/tp, D] of a column-parallel product.

    deferred   None, or the queue into which the backward puts the weight gradient's product instead of computing it
    replicas   None, or the Comm of the ranks that hold the same shard and sum its gradient
    products   the functions that multiply by it, such as `--products` selects
    """

    weight: Tensor
    deferred: WeightGradients | None = None
    replicas: Comm | None = None
    products: Products = PLAIN

    @property
    def is_deferred(self) -> bool:
        return self.deferred is not None and self.weight.requires_grad and self.weight.is_leaf

    def sum_over_replicas(self, dw: Tensor) -> Tensor:
        return dw if self.replicas is None else self.replicas.all_reduce_(dw)


def column_parallel(
    comm: Comm, x: Tensor, matrices: Sequence[ShardedWeight], sequence_parallel: bool = False
) -> tuple[Tensor, ...]:
    """Multiply one input by several weights whose output features are split over `comm`: y_i = x w_i^T.

    x    [B, T, D]          the same on every rank; where `sequence_parallel`, this rank's [B, T/tp, D]
    w_i  [F_i/tp, D]        rows r*F_i/tp ... of the full weight
    y_i  [B, T, F_i/tp]     each rank has its own features

    backward   dx = sum over ranks of sum_i dy_i w_i    one all-reduce (where `sequence_parallel`, one reduce-scatter)
               dw_i = dy_i^T x                          computed during that sum, or deferred

    Sends 2(tp-1)/tp * B*T*D elements backward. Where `sequence_parallel`, sends (tp-1)/tp * B*T*D forward, to gather x, and
    twice that backward: only the shard of x is saved, so x is gathered again while dx is computed. Also sends
    2(g-1)/g * |w_i| for the gradient of a w_i that g ranks hold. A deferred weight gradient keeps the gathered x.
    """
    x, *weights = autocast.cast(x, *(m.weight for m in matrices))
    matrices = [m._replace(weight=weight) for m, weight in zip(matrices, weights)]
    autograd_weights = [None if m.is_deferred else m.weight for m in matrices]
    queues = [m.deferred for m in matrices if m.deferred is not None and m.is_deferred]
    anchor = None if x.requires_grad or not queues else queues[0].anchor
    arguments = x, comm, matrices, sequence_parallel, anchor, *autograd_weights
    ys: tuple[Tensor, ...] = _ColumnParallel.apply(*arguments)  # type: ignore[no-untyped-call]
    return ys


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Comm,
        matrices: Sequence[ShardedWeight],
        sequence_parallel: bool,
        anchor: Tensor | None,
        *autograd_weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.matrices, ctx.sequence_parallel = comm, matrices, sequence_parallel
        ctx.needs_dw = [m.is_deferred or needed for m, needed in zip(matrices, ctx.needs_input_grad[5:])]
        ctx.save_for_backward(x if any(ctx.needs_dw) else None, *(m.weight for m in matrices))
        whole = start_gather_tokens(comm, x)() if sequence_parallel else x
        return tuple(m.products.output(whole, m.weight) for m in matrices)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sequence_parallel or ctx.comm.size > 1:
            autograd.refuse_second_derivatives("column_parallel")
        x, *weights = ctx.saved_tensors
        regather = ctx.sequence_parallel and any(ctx.needs_dw)
        whole = start_gather_tokens(ctx.comm, x) if regather else lambda: x
        finish_dx = _start_dx(ctx, dys, weights) if ctx.needs_input_grad[0] else lambda: None
        x = whole()
        finish_dws = [
            _start_dw(m, dy, x) if needs_dw else lambda: None
            for m, dy, needs_dw in zip(ctx.matrices, dys, ctx.needs_dw)
        ]
        return finish_dx(), None, None, None, None, *(finish() for finish in finish_dws)


def _start_dx(ctx: Any, dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Compute this rank's term of dx and start the sum over ranks."""
    dx = None
    for sharded_weight, dy, weight in zip(ctx.matrices, dys, weights):
        dx = sharded_weight.products.input_gradient(dy, weight, add_to=dx)
    assert dx is not None
    dx = dx.view(*dys[0].shape[:-1], -1)
    if ctx.sequence_parallel:
        return start_reduce_scatter_tokens(ctx.comm, dx)
    summing: Pending = ctx.comm.all_reduce_(dx, async_op=True)  # in place: nothing else refers to dx
    return summing.wait


def _start_dw(sharded_weight: ShardedWeight, dy: Tensor, x: Tensor) -> Callable[[], Tensor | None]:
    """Compute dw and start its sum over the replicas, or defer both."""
    if sharded_weight.deferred is not None and sharded_weight.is_deferred:
        compute = partial(weight_gradient, sharded_weight, dy, x)
        sharded_weight.deferred.put(partial(add_later, [sharded_weight], lambda: [compute()]))
        return lambda: None
    dw = weight_gradient(sharded_weight, dy, x)
    if sharded_weight.replicas is None:
        return lambda: dw
    summing: Pending = sharded_weight.replicas.all_reduce_(dw, async_op=True)
    return summing.wait


@torch.no_grad()
def add_later(matrices: Sequence[ShardedWeight], compute: Callable[[], list[Tensor]]) -> None:
    """Compute deferred weight gradients, sum each over its replicas, and add it to its weight's gradient."""
    for sharded_weight, dw in zip(matrices, compute()):
        accumulate_gradient(sharded_weight.weight, sharded_weight.sum_over_replicas(dw))


def weight_gradient(sharded_weight: ShardedWeight, dy: Tensor, x: Tensor) -> Tensor:
    return sharded_weight.products.weight_gradient(dy, x)
