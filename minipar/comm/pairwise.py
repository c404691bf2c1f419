"""Pairwise all-to-all: in step s each rank sends to the rank s after it and receives from the rank s before it.

Adds to `simple/collectives.py`: all exchanges are posted at once.

In a step, each rank sends to one rank and receives from one rank only, so no link is shared. Cost for n bytes in x,
the local chunk included: (p-1) alpha + (p-1)/p n beta (Thakur et al. 2005, section 4.6).
"""

from __future__ import annotations

import torch

from minipar.comm.point_to_point import PointToPoint, Sizes
from minipar.support.chunks import bounds, check_sizes


def all_to_all(
    comm: PointToPoint,
    x: torch.Tensor,
    send_sizes: Sizes = None,
    recv_sizes: Sizes = None,
) -> torch.Tensor:
    """Transpose the chunks along dim 0: rank r's chunk s becomes chunk r on rank s.

    x     [sum(send_sizes), ...]   chunk s for rank s; default: torch.chunk's sizes, which must be equal across ranks
    out   [sum(recv_sizes), ...]   chunk s from rank s

    Sends x without its local chunk (the chunk for this rank): (p-1)/p of x if all chunks are equal.
    Raises ValueError if the sizes do not add up to x's length, or give the local chunk two different sizes.
    """
    p, rank = comm.size, comm.rank
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    x = x.detach().contiguous()
    from_, to = bounds(send_sizes), bounds(recv_sizes)
    out = x.new_empty((to[-1], *x.shape[1:]))
    posted = []
    for step in range(1, p):
        dest, source = (rank + step) % p, (rank - step) % p
        chunk = x[from_[dest] : from_[dest + 1]]
        target = out[to[source] : to[source + 1]]
        posted.append(comm.exchange(chunk, dest, target.shape, x.dtype, source, out=target, async_op=True))
    out[to[rank] : to[rank + 1]] = x[from_[rank] : from_[rank + 1]]
    # All exchanges are posted before the first wait, so a peer that is late in one step does not delay the others. (Long
    # messages between ranks of one machine do wait for their turn: see shared_memory.py.)
    for exchange in posted:
        exchange.wait()
    return out


def all_to_all_sizes(
    comm: PointToPoint, x: torch.Tensor, send_sizes: Sizes, recv_sizes: Sizes
) -> tuple[list[int], list[int]]:
    """Check and return both lists of sizes; without recv_sizes, every rank is assumed to have these send_sizes."""
    send_sizes = check_sizes(send_sizes, x.shape[0], comm.size, "send_sizes")
    if recv_sizes is None:
        recv_sizes = [send_sizes[comm.rank]] * comm.size
    recv_sizes = [int(s) for s in recv_sizes]
    if len(recv_sizes) != comm.size or min(recv_sizes) < 0 or recv_sizes[comm.rank] != send_sizes[comm.rank]:
        raise ValueError(
            f"recv_sizes={recv_sizes} must name {comm.size} sizes, "
            f"at place {comm.rank} the one that stays, {send_sizes[comm.rank]}"
        )
    return send_sizes, recv_sizes
