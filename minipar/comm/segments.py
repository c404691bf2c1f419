"""The step that every reduction is made of: give something, take something, add one's own to it."""

from __future__ import annotations

import torch

from minipar.comm.chunks import Reduction

# What arrives should still be in the cache when it is added; shorter segments would cost more in Python than they save.
SEGMENT_BYTES = 4 << 20


def exchange_and_add(
    comm, give: torch.Tensor, to: int, mine: torch.Tensor, source: int, how: Reduction, out: torch.Tensor
) -> torch.Tensor:
    """Send `give` to rank `to`; out = mine + what rank `source` sends, flat tensors of one length. Returns out.

    Both travel in messages of at most SEGMENT_BYTES, one after the other. `out` may be `mine` or `give` itself: a
    segment is written to when it has been read and has left.
    """
    length = max(1, SEGMENT_BYTES // give.element_size())
    longest = max(give.numel(), mine.numel())
    if longest <= length:
        arrived = comm.scratch(mine.numel(), mine.dtype)
        comm.exchange(give, to, arrived.shape, arrived.dtype, source, out=arrived)
        return how.combine(arrived, mine, out=out)
    for start in range(0, longest, length):
        piece = slice(start, start + length)
        exchange_and_add(comm, give[piece], to, mine[piece], source, how, out[piece])
    return out
