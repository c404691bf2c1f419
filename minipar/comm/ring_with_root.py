"""Broadcast and reduce for long vectors: half of a ring all-reduce, plus a message per chunk from or to the root."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm import ring
from minipar.comm.point_to_point import PointToPoint
from minipar.support.chunks import bounds, chunk_sizes


def broadcast(comm: PointToPoint, x: Tensor, root: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the root's x on every rank, for long vectors: scatter from the root, then a ring all-gather (van de Geijn).

    Costs 2(p-1) alpha + 2 (p-1)/p n beta: twice the least possible bytes; a tree sends log p / 2 times as many. The
    root sends all chunks but its own; then every rank sends all chunks but its right neighbour's.
    """
    p = comm.size
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    chunks = ring.cut(out.view(-1), bounds(chunk_sizes(x.numel(), p)))
    if comm.rank == root:
        out.copy_(x.detach())
        for handle in [comm.send(chunks[r], r, async_op=True) for r in range(p) if r != root]:
            handle.wait()
    else:
        own = chunks[comm.rank]
        comm.exchange(None, None, own.shape, own.dtype, root, out=own)
    ring.all_gather_steps(comm, chunks)
    return out


def reduce(comm: PointToPoint, x: Tensor, root: int = 0, op: str = "sum") -> Tensor | None:
    """Return the sum over ranks of x on the root, None elsewhere: a reduce-scatter, then each rank sends its chunk.

    Costs 2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma. Each rank sends all chunks of x but its own, then its chunk
    of the sum.
    """
    flat = ring.flatten(x)
    sizes = chunk_sizes(flat.numel(), comm.size)
    own = ring.reduce_scatter(comm, flat, op, sizes)
    if comm.rank != root:
        comm.send(own, root)
        return None
    out = torch.empty_like(flat)
    chunks = ring.cut(out, bounds(sizes))
    chunks[root].copy_(own)
    others = [r for r in range(comm.size) if r != root]
    for handle in [comm.exchange(None, None, None, None, r, out=chunks[r], async_op=True) for r in others]:
        handle.wait()
    return out.view(x.shape)
