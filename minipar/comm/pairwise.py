"""Pairwise all-to-all: in step s exchange with the ranks s away, so every pair meets once and no link is shared.

`simple/collectives.py`, plus all exchanges under way at once.

Cost: (p-1) alpha + (p-1)/p n beta for n bytes in x, the local chunk among them (Thakur et al. 2005, section 4.6).
"""

from __future__ import annotations

import torch

from minipar.chunks import bounds, check_sizes


def all_to_all(comm, x: torch.Tensor, send_sizes=None, recv_sizes=None) -> torch.Tensor:
    """Rank r's chunk s goes to rank s, which puts it at place r: a transposition of chunks, along dim 0.

    x     [sum(send_sizes), ...]   chunk s for rank s; by default cut as torch.chunk cuts, alike on all ranks
    out   [sum(recv_sizes), ...]   chunk s from rank s

    Sends x but the chunk that stays: (p-1)/p of it where all chunks are alike.
    Raises ValueError where the sizes do not cut x, or the chunk that stays differs from itself.
    """
    p, rank = comm.size, comm.rank
    send_sizes, recv_sizes = all_to_all_sizes(comm, x, send_sizes, recv_sizes)
    x, from_, to = x.detach().contiguous(), bounds(send_sizes), bounds(recv_sizes)
    out = x.new_empty((to[-1], *x.shape[1:]))
    posted = []
    for step in range(1, p):
        dest, source = (rank + step) % p, (rank - step) % p
        target, chunk = out[to[source] : to[source + 1]], x[from_[dest] : from_[dest + 1]]
        posted.append(comm.exchange(chunk, dest, target.shape, x.dtype, source, out=target, async_op=True))
    out[to[rank] : to[rank + 1]] = x[from_[rank] : from_[rank + 1]]
    # All are under way at once: nobody waits for a neighbour that is late in an earlier step.
    for exchange in posted:
        exchange.wait()
    return out


def all_to_all_sizes(comm, x: torch.Tensor, send_sizes, recv_sizes) -> tuple[list[int], list[int]]:
    """Both lists of sizes, checked; where only one is given the exchange is taken to be alike on all ranks."""
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
