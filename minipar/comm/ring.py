"""Ring collectives: each rank sends to its right neighbour and receives from its left one, one chunk per step.

`simple/collectives.py`, plus uneven chunk sizes, any reduction, messages in segments, results in given memory.

The three below are bandwidth-optimal: no algorithm sends fewer bytes per rank. Their latency is proportional to p.

Costs, with p ranks, n bytes in the whole vector, latency alpha, seconds per byte beta, seconds to add a byte gamma
(Thakur, Rabenseifner, Gropp 2005, sections 4.1-4.5):

    reduce_scatter   (p-1) alpha + (p-1)/p n (beta + gamma)
    all_gather       (p-1) alpha + (p-1)/p n beta
    all_reduce      2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma

A partial sum is sent in segments, each one message (`reduction.py`); a complete chunk is sent as one message.
"""

from __future__ import annotations

import torch

from minipar.chunks import bounds, check_sizes, chunk_sizes
from minipar.comm.reduction import exchange_and_add, find_reduction


def reduce_scatter(
    comm, x: torch.Tensor, op: str = "sum", sizes=None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's chunk of the sum over ranks of x: x [N, ...] -> [sizes[r], ...], cut along dim 0.

    The partial sum of chunk c starts at rank c+1 and is passed around the ring; each rank adds its part, rank c last. So
    chunk c is summed in the order of ranks c+1, c+2, ..., c. Sends all of x but this rank's own chunk: (p-1)/p of it
    where p divides N. `out`, if given, receives the result; it may be this rank's chunk of x.
    """
    p, rank = comm.size, comm.rank
    sizes = check_sizes(sizes, x.shape[0], p, "sizes")
    out = x.new_empty((sizes[rank], *x.shape[1:])) if out is None else out
    parts = _chunks(_flat(x), _edges(sizes, x))
    if p == 1:
        _copy_unless_alias(x, out.view(-1))
    # One buffer serves all partial sums: a partial sum has been sent before the next one is written.
    buffer = comm.scratch(max(part.numel() for part in parts), x.dtype, "partial sum")
    outputs = [buffer[: part.numel()] for part in parts]
    outputs[rank] = out.view(-1)
    _ring_steps(comm, range(1, p), parts, outputs, find_reduction(op, x.dtype))
    return out


def all_gather(comm, x: torch.Tensor, sizes=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate every rank's x along dim 0: x [sizes[r], ...] -> [sum(sizes), ...]; without `sizes`, all are equal.

    Each step passes on the chunk received in the step before. Sends every chunk but the right neighbour's: (p-1)/p of the
    result where all are equal. `out`, if given, receives the result; if x already is its chunk of `out`, nothing is copied.
    """
    p, sizes = comm.size, gathered_sizes(comm, x, sizes)
    out = x.new_empty((sum(sizes), *x.shape[1:])) if out is None else out
    chunks = _chunks(out.view(-1), _edges(sizes, x))
    _copy_unless_alias(x, chunks[comm.rank])
    _ring_steps(comm, range(p, 2 * p - 1), chunks, chunks)
    return out


def all_reduce(comm, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum over ranks of x on every rank, bitwise equal: a reduce-scatter, then an all-gather.

    Sends 2(p-1)/p of x where p divides its length; else all of it twice, less chunk r and chunk r+1 (mod p), cut as
    torch.chunk cuts. `out`, if given, receives the result; it may be x itself.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    flat, target, p = _flat(x), out.view(-1), comm.size
    edges = bounds(chunk_sizes(flat.numel(), p))
    if p == 1:
        _copy_unless_alias(flat, target)
    _ring_steps(
        comm, range(1, 2 * p - 1), _chunks(flat, edges), _chunks(target, edges), find_reduction(op, x.dtype)
    )
    return out


def broadcast(comm, x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Return the root's x on every rank, for long vectors: scatter from the root, then a ring all-gather (van de Geijn).

    Costs 2(p-1) alpha + 2 (p-1)/p n beta: twice the least number of bytes, but log p / 2 times fewer than a tree. The
    root sends all chunks but its own; then every rank sends all chunks but its right neighbour's.
    """
    p, out = comm.size, torch.empty_like(x, memory_format=torch.contiguous_format)
    chunks = _chunks(out.view(-1), bounds(chunk_sizes(x.numel(), p)))
    if comm.rank == root:
        out.copy_(x.detach())
        for handle in [comm.send(chunks[r], r, async_op=True) for r in range(p) if r != root]:
            handle.wait()
    else:
        own = chunks[comm.rank]
        comm.exchange(None, None, own.shape, own.dtype, root, out=own)
    _ring_steps(comm, range(p, 2 * p - 1), chunks, chunks)
    return out


def reduce(comm, x: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor | None:
    """Return the sum over ranks of x on the root, None elsewhere: a reduce-scatter, then every rank sends it its chunk.

    Costs 2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma. Each rank sends all chunks of x but its own, then its chunk
    of the sum.
    """
    flat = _flat(x)
    sizes = chunk_sizes(flat.numel(), comm.size)
    own = reduce_scatter(comm, flat, op, sizes)
    if comm.rank != root:
        comm.send(own, root)
        return None
    out = torch.empty_like(flat)
    chunks = _chunks(out, bounds(sizes))
    chunks[root].copy_(own)
    others = [r for r in range(comm.size) if r != root]
    for handle in [comm.exchange(None, None, None, None, r, out=chunks[r], async_op=True) for r in others]:
        handle.wait()
    return out.view(x.shape)


# Around the ring ------------------------------------------------------------------------------------------------
#
# In step s = 1, 2, ... rank r sends chunk r-s and receives chunk r-s-1 (mod p). In the first p-1 steps it adds its own
# part to the received chunk, so that rank r ends with the complete chunk r: the reduce-scatter. In the next p-1 steps
# complete chunks are passed on: the all-gather. An all-reduce runs both in one loop.


def _ring_steps(comm, steps: range, parts, outputs, reduction=None) -> None:
    """Run ring steps. parts[c] is this rank's part of chunk c; outputs[c], which may alias it, receives the chunk."""
    p, rank = comm.size, comm.rank
    left, right = (rank - 1) % p, (rank + 1) % p
    for step in steps:
        sent, c = (parts if step == 1 else outputs)[(rank - step) % p], (rank - step - 1) % p
        if step < p:
            exchange_and_add(comm, sent, right, parts[c], left, reduction, out=outputs[c])
        else:
            comm.exchange(sent, right, outputs[c].shape, outputs[c].dtype, left, out=outputs[c])
        if step == p - 1 and reduction.divide:
            outputs[c].div_(p)


def _chunks(flat: torch.Tensor, edges) -> list[torch.Tensor]:
    return [flat[a:b] for a, b in zip(edges, edges[1:])]


def _copy_unless_alias(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy x into `out`, unless both are the same memory."""
    if x.data_ptr() != out.data_ptr():
        out.copy_(_flat(x))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1)


def _edges(sizes, x: torch.Tensor) -> list[int]:
    return [edge * x.shape[1:].numel() for edge in bounds(sizes)]


def gathered_sizes(comm, x: torch.Tensor, sizes) -> list[int]:
    """Return the length along dim 0 of each rank's input to an all-gather. Raises ValueError where x disagrees."""
    sizes = [x.shape[0]] * comm.size if sizes is None else [int(s) for s in sizes]
    if len(sizes) != comm.size or sizes[comm.rank] != x.shape[0]:
        raise ValueError(
            f"sizes={sizes} must name {comm.size} lengths, x's {x.shape[0]} at place {comm.rank}"
        )
    return sizes
