"""Ring collectives: each rank sends to its right neighbour and receives from its left one, one chunk per step.

Adds to `simple/collectives.py`: uneven chunk sizes, any reduction, messages in segments, results in a given tensor.

These collectives are bandwidth-optimal: no algorithm sends fewer bytes per rank. Their latency is proportional to p.

Costs, with p ranks, n bytes in the whole vector, latency alpha, time to send a byte beta, time to add a byte gamma
(Thakur, Rabenseifner, Gropp 2005, sections 4.1-4.5):

    reduce_scatter   (p-1) alpha + (p-1)/p n (beta + gamma)
    all_gather       (p-1) alpha + (p-1)/p n beta
    all_reduce      2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma

A partial sum is sent in segments, each one message (`reduction.py`); a complete chunk is sent as one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.comm.reduction import Reduction, exchange_and_add, find_reduction
from minipar.support.chunks import bounds, check_sizes, chunk_sizes


def reduce_scatter(
    comm: PointToPoint, x: Tensor, op: str = "sum", sizes: Sizes = None, out: Tensor | None = None
) -> Tensor:
    """Return this rank's chunk of the sum over ranks of x: x [N, ...] -> [sizes[r], ...], cut along dim 0.

    The partial sum of chunk c starts at rank c+1 and is passed around the ring; each rank adds its part, rank c last. So
    chunk c is summed in the order of ranks c+1, c+2, ..., c. Sends all of x but this rank's own chunk: (p-1)/p of it
    if p divides N. `out`, if given, receives the result; it may be this rank's chunk of x.
    """
    p, rank = comm.size, comm.rank
    sizes = check_sizes(sizes, x.shape[0], p, "sizes")
    if out is None:
        out = x.new_empty((sizes[rank], *x.shape[1:]))
    if p == 1:
        _copy_unless_alias(x, out.view(-1))
    parts = cut(flatten(x), _edges(sizes, x))
    # One buffer serves all partial sums: a partial sum has been sent before the next one is written.
    buffer = comm.scratch(max(part.numel() for part in parts), x.dtype, "partial sum")
    outputs = [buffer[: part.numel()] for part in parts]
    outputs[rank] = out.view(-1)
    _reduce_scatter_steps(comm, parts, outputs, find_reduction(op, x.dtype))
    return out


def all_gather(comm: PointToPoint, x: Tensor, sizes: Sizes = None, out: Tensor | None = None) -> Tensor:
    """Concatenate every rank's x along dim 0: x [sizes[r], ...] -> [sum(sizes), ...]; without `sizes`, all are equal.

    Each step passes on the chunk received in the step before. Sends every chunk but the right neighbour's: (p-1)/p of the
    result if all are equal. `out`, if given, receives the result; if x already is its chunk of `out`, nothing is copied.
    """
    sizes = gathered_sizes(comm, x, sizes)
    if out is None:
        out = x.new_empty((sum(sizes), *x.shape[1:]))
    chunks = cut(out.view(-1), _edges(sizes, x))
    _copy_unless_alias(x, chunks[comm.rank])
    all_gather_steps(comm, chunks)
    return out


def all_reduce(comm: PointToPoint, x: Tensor, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """Return the sum over ranks of x on every rank, bitwise equal: a reduce-scatter, then an all-gather.

    Sends 2(p-1)/p of x if p divides its length. Otherwise rank r sends every chunk twice, except chunks r and r+1 (mod p),
    which it sends once; x is split as torch.chunk does. `out`, if given, receives the result; it may be x itself.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat, target = flatten(x), out.view(-1)
    if comm.size == 1:
        _copy_unless_alias(flat, target)
    edges = bounds(chunk_sizes(flat.numel(), comm.size))
    chunks = cut(target, edges)
    _reduce_scatter_steps(comm, cut(flat, edges), chunks, find_reduction(op, x.dtype))
    all_gather_steps(comm, chunks)
    return out


# Around the ring: in step s = 1, 2, ... rank r sends chunk r-s and receives chunk r-s-1 (mod p). In the first p-1 steps
# it adds its own part to the received chunk, so that rank r ends with the complete chunk r: the reduce-scatter. In the
# next p-1 steps complete chunks are passed on: the all-gather.


def _reduce_scatter_steps(
    comm: PointToPoint, parts: list[Tensor], outputs: list[Tensor], reduction: Reduction
) -> None:
    """Run steps 1 to p-1. parts[c] is this rank's part of chunk c; outputs[c], which may alias it, receives the sum."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    sent = parts[left]
    for step in range(1, p):
        c = (rank - step - 1) % p
        sent = exchange_and_add(comm, sent, right, parts[c], left, reduction, out=outputs[c])
    if reduction.divide:
        outputs[rank].div_(p)


def all_gather_steps(comm: PointToPoint, chunks: list[Tensor]) -> None:
    """Run steps p to 2p-2. This rank has its own chunk of `chunks`, and receives the other chunks."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    for step in range(p, 2 * p - 1):
        sent, received = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        comm.exchange(sent, right, received.shape, received.dtype, left, out=received)


def flatten(x: Tensor) -> Tensor:
    """Return x as a vector, without its gradient."""
    return x.detach().contiguous().view(-1)


def cut(flat: Tensor, edges: list[int]) -> list[Tensor]:
    return [flat[a:b] for a, b in zip(edges, edges[1:])]


def _edges(sizes: Sequence[int], x: Tensor) -> list[int]:
    """Return the edges, in the flattened x, of chunks with `sizes` rows."""
    return [edge * x.shape[1:].numel() for edge in bounds(sizes)]


def _copy_unless_alias(x: Tensor, out: Tensor) -> None:
    """Copy x into `out`, unless both are the same memory."""
    flat = flatten(x)  # a copy, if x is a transposed view of `out`
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat)


def gathered_sizes(comm: PointToPoint, x: Tensor, sizes: Sizes) -> list[int]:
    """Return the length along dim 0 of each rank's input to an all-gather. Raises ValueError if x has another length."""
    lengths = [x.shape[0]] * comm.size if sizes is None else [int(s) for s in sizes]
    if len(lengths) != comm.size or lengths[comm.rank] != x.shape[0]:
        raise ValueError(
            f"sizes={lengths} must name {comm.size} lengths, x's {x.shape[0]} at place {comm.rank}"
        )
    return lengths
