"""Sequence parallelism's communication in chunks, each overlapped with the matrix product of another chunk.

    gather_matmul    all-gather x, then x w^T     each rank multiplies one chunk of x while it receives the next one
    matmul_scatter   x w^T, then reduce-scatter   each rank sends one partial sum while it computes the next term

Sends the same bytes and computes the same products as the plain collectives, in tp chunks. Saves at most the shorter of
communication and computation time, less what smaller products cost. Also called asynchronous tensor parallelism, or
collective matmul.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.model import autocast
from minipar.model.deferrable_linear import WeightGradients
from minipar.model.products import PLAIN
from minipar.support.errors import require_divides
from minipar.tensor_parallel.column import ShardedWeight, add_later
from minipar.tensor_parallel.sequence import TOKEN_DIM


def ring_all_gather_chunks(comm: Comm, chunk: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, chunk of that rank) for every rank, this rank first, while the next chunk is being received.

    Sends tp-1 chunks.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunk = chunk.detach().contiguous()
    for step in range(comm.size - 1):
        arriving = comm.exchange(chunk, right, chunk.shape, chunk.dtype, left, async_op=True)
        yield (comm.rank - step) % comm.size, chunk
        chunk = arriving.wait()
    # After tp-1 steps to the right, the last chunk to arrive is the right neighbour's.
    yield right, chunk


def ring_reduce_scatter_terms(comm: Comm, term: Callable[[int], Tensor]) -> Tensor:
    """Return this rank's chunk of a ring reduce-scatter; its terms are computed while partial sums are being sent.

    term(c) is this rank's term of rank c's sum. That sum starts at rank c+1 and is passed along the ring to rank c.
    Sends tp-1 terms.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    total = term(left)
    for step in range(1, comm.size):
        arriving = comm.exchange(total, right, total.shape, total.dtype, left, async_op=True)
        mine = term((left - step) % comm.size)
        total = arriving.wait().add_(mine)
    return total


def gather_matmul(comm: Comm, x: Tensor, matrices: Sequence[ShardedWeight]) -> tuple[Tensor, ...]:
    """Compute `column_parallel(comm, x, matrices, sequence_parallel=True)` in chunks.

    x    [B, T/tp, D]  this rank's tokens        w_i  [F_i/tp, D]        y_i  [B, T, F_i/tp]

    backward   dx = sum over ranks of sum_i dy_i w_i, this rank's tokens    in chunks
               dw_i = dy_i^T x                                              while x is gathered again, in chunks

    Sends (tp-1)/tp * B*T*D elements forward, twice as many backward, and 2(g-1)/g * |w_i| for the gradient of a w_i that g
    ranks hold. Deferred weight gradients share one later gather of x; without weight gradients x is not gathered again.
    """
    x, *weights = autocast.cast(x, *(m.weight for m in matrices))
    matrices = [m._replace(weight=weight) for m, weight in zip(matrices, weights)]
    autograd_weights = [None if m.is_deferred else m.weight for m in matrices]
    queues = [m.deferred for m in matrices if m.deferred is not None and m.is_deferred]
    anchor = None if x.requires_grad or not queues else queues[0].anchor
    arguments = x, comm, matrices, anchor, *autograd_weights
    ys: tuple[Tensor, ...] = _GatherMatmul.apply(*arguments)  # type: ignore[no-untyped-call]
    return ys


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Comm,
        matrices: Sequence[ShardedWeight],
        anchor: Tensor | None,
        *autograd_weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.matrices = comm, matrices
        ctx.immediate = [
            needed and not m.is_deferred for m, needed in zip(matrices, ctx.needs_input_grad[4:])
        ]
        needs_x = any(ctx.immediate) or any(m.is_deferred for m in matrices)
        ctx.save_for_backward(x if needs_x else None, *(m.weight for m in matrices))
        pieces: list[list[Tensor]] = [[]] * comm.size
        for rank, chunk in ring_all_gather_chunks(comm, x):
            pieces[rank] = [F.linear(chunk, m.weight) for m in matrices]
        return tuple(torch.cat(ys, TOKEN_DIM) for ys in zip(*pieces))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        autograd.refuse_second_derivatives("gather_matmul")
        x, *weights = ctx.saved_tensors
        comm, matrices = ctx.comm, ctx.matrices
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ring_reduce_scatter_terms(
                comm, lambda rank: sum(_tokens_of_rank(comm, dy, rank) @ w for dy, w in zip(dys, weights))
            )
        immediate = [(m, dy) for m, dy, needed in zip(matrices, dys, ctx.immediate) if needed]
        deferred = [(m, dy) for m, dy in zip(matrices, dys) if m.is_deferred]
        if deferred:
            later, later_dys = zip(*deferred)
            later[0].deferred.put(partial(add_later, later, partial(_column_gradients, comm, x, later_dys)))
        dws = [None] * len(matrices)
        if any(ctx.immediate):
            found = iter(_column_gradients(comm, x, [dy for _, dy in immediate]))
            dws = [
                m.sum_over_replicas(next(found)) if now else None for m, now in zip(matrices, ctx.immediate)
            ]
        return dx, None, None, None, *dws


def _column_gradients(comm: Comm, x: Tensor, dys: Sequence[Tensor]) -> list[Tensor]:
    """Compute dw = dy^T x for several dy while x is gathered in chunks."""
    # Use activation shapes: FSDP may have resharded the weights before their deferred gradients run.
    dws = [x.new_zeros(dy.shape[-1], x.shape[-1]) for dy in dys]
    for rank, chunk in ring_all_gather_chunks(comm, x):
        for dw, dy in zip(dws, dys):
            dw += PLAIN.weight_gradient(_tokens_of_rank(comm, dy, rank), chunk)
    return dws


def matmul_scatter(comm: Comm, x: Tensor, weight: Tensor, deferred: WeightGradients | None = None) -> Tensor:
    """Compute `reduce_scatter_tokens(comm, linear(x, weight))` in chunks.

    x  [B, T, D/tp]    w  [F, D/tp]    y  [B, T/tp, F]  this rank's tokens of the sum over ranks

    backward   dx = dy w, dw = dy^T x    while dy is gathered in chunks

    Sends (tp-1)/tp * B*T*F elements forward, and as many backward. A deferred weight gradient keeps the gathered dy.
    """
    require_divides("tp", comm.size, "tokens", x.shape[TOKEN_DIM])
    x, weight = autocast.cast(x, weight)
    sharded_weight = ShardedWeight(weight, deferred)
    anchor = autograd_weight = None
    if deferred is None or not sharded_weight.is_deferred:
        autograd_weight = weight
    elif not x.requires_grad:
        anchor = deferred.anchor
    y: Tensor = _MatmulScatter.apply(x, comm, sharded_weight, anchor, autograd_weight)  # type: ignore[no-untyped-call]
    return y


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Comm,
        sharded_weight: ShardedWeight,
        anchor: Tensor | None,
        autograd_weights: Tensor | None,
    ) -> Tensor:
        ctx.comm, ctx.sharded_weight = comm, sharded_weight
        ctx.needs_dw = sharded_weight.is_deferred or ctx.needs_input_grad[4]
        ctx.save_for_backward(x if ctx.needs_dw else None, sharded_weight.weight)
        return ring_reduce_scatter_terms(
            comm, lambda rank: F.linear(_tokens_of_rank(comm, x, rank), sharded_weight.weight)
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        autograd.refuse_second_derivatives("matmul_scatter")
        x, weight = ctx.saved_tensors
        comm, sharded_weight = ctx.comm, ctx.sharded_weight
        needs_dx = ctx.needs_input_grad[0]
        dxs = [dy] * comm.size  # each is replaced by this rank's product
        dy_chunks: Iterable[tuple[int, Tensor]] = ring_all_gather_chunks(comm, dy)
        if sharded_weight.is_deferred:
            dy_chunks = list(dy_chunks)
            compute = partial(_row_gradient, comm, x, dy_chunks)
            sharded_weight.deferred.put(partial(add_later, [sharded_weight], compute))
        dw = torch.zeros_like(weight) if ctx.needs_dw and not sharded_weight.is_deferred else None
        for rank, chunk in dy_chunks:
            if needs_dx:
                dxs[rank] = chunk @ weight
            if dw is not None:
                dw += PLAIN.weight_gradient(chunk, _tokens_of_rank(comm, x, rank))
        return torch.cat(dxs, TOKEN_DIM) if needs_dx else None, None, None, None, dw


def _row_gradient(comm: Comm, x: Tensor, dy_chunks: list[tuple[int, Tensor]]) -> list[Tensor]:
    dw = x.new_zeros(dy_chunks[0][1].shape[-1], x.shape[-1])
    for rank, chunk in dy_chunks:
        dw += PLAIN.weight_gradient(chunk, _tokens_of_rank(comm, x, rank))
    return [dw]


def _tokens_of_rank(comm: Comm, x: Tensor, rank: int) -> Tensor:
    """Return the tokens of x that belong to `rank`."""
    return x.chunk(comm.size, TOKEN_DIM)[rank]
