"""Binomial trees: in each of log p steps of a broadcast, the number of ranks that have the data doubles.

Adds to `simple/collectives.py`: reduce, which is the same tree from the leaves to the root, and all-reduce.

Costs (Thakur, Rabenseifner, Gropp 2005, sections 4.3-4.5), p ranks, n bytes:

    broadcast   ceil(log p) (alpha + n beta)
    reduce      ceil(log p) (alpha + n beta + n gamma)
    all_reduce  both, one after the other

A tree takes few steps, but sends the whole vector in each, so it is for short vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm.point_to_point import PointToPoint
from minipar.comm.reduction import Reduction, find_reduction


def broadcast(comm: PointToPoint, x: Tensor, root: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the root's x on every rank. The root sends x ceil(log2 p) times, all ranks together p-1 times."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if comm.rank == root:
        _broadcast_in(comm, x.detach().contiguous(), root)
        out.copy_(x.detach())  # last, since the others wait for the messages
    else:
        _broadcast_in(comm, out, root)
    return out


def reduce(comm: PointToPoint, x: Tensor, root: int = 0, op: str = "sum") -> Tensor | None:
    """Return the sum over ranks of x on the root, None elsewhere. Every rank but the root sends x once."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _reduce_into(comm, x, out, root, find_reduction(op, x.dtype))
    return out if comm.rank == root else None


def all_reduce(comm: PointToPoint, x: Tensor, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """Reduce to rank 0, then broadcast from it. All ranks together send x p-1 times in each half."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _reduce_into(comm, x, out, 0, find_reduction(op, x.dtype))
    _broadcast_in(comm, out, 0)
    return out


def _broadcast_in(comm: PointToPoint, out: Tensor, root: int) -> None:
    """Receive from the parent into `out`, then send it to the children; the root only sends.

    `place` is this rank's position counted from the root, mod p. Clearing its lowest set bit gives the parent's position.
    """
    p = comm.size
    place = (comm.rank - root) % p
    distance = 1
    while distance < p and not place & distance:
        distance *= 2
    if place:
        comm.exchange(None, None, out.shape, out.dtype, (place - distance + root) % p, out=out)
    while distance > 1:
        distance //= 2
        if place + distance < p:
            comm.send(out, (place + distance + root) % p)


def _reduce_into(comm: PointToPoint, x: Tensor, out: Tensor, root: int, reduction: Reduction) -> None:
    """Add the sums received from the children, nearest first, and send the total to the parent (see `_broadcast_in`)."""
    p = comm.size
    place = (comm.rank - root) % p
    sums = x.detach()
    distance = 1
    while distance < p and not place & distance:
        if place + distance < p:
            received = comm.scratch(x.numel(), x.dtype).view(x.shape)
            comm.exchange(None, None, x.shape, x.dtype, (place + distance + root) % p, out=received)
            sums = reduction.combine(sums, received, out=out)
        distance *= 2
    if place:
        comm.send(sums, (place - distance + root) % p)
        return
    if sums is not out:
        out.copy_(sums)
    if reduction.divide:
        out.div_(p)
