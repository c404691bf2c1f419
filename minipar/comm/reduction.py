"""Reduction operators, and the step that every reduction repeats: send a chunk, receive a chunk, add the local chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minipar.comm.point_to_point import PointToPoint
from minipar.support.errors import one_of

# A received segment should still be in the cache when it is added; shorter segments cost more in Python than they save.
SEGMENT_BYTES = 4 << 20


class Reduction(NamedTuple):
    """A reduction: combine(a, b, out=...) reduces two tensors; if `divide`, the sum is divided by the number of ranks."""

    combine: Callable[..., torch.Tensor]
    torch_name: str  # the reduction's name in torch.distributed
    divide: bool


REDUCTIONS = {
    "sum": Reduction(torch.add, "SUM", False),
    "mean": Reduction(torch.add, "SUM", True),
    "max": Reduction(torch.maximum, "MAX", False),
    "min": Reduction(torch.minimum, "MIN", False),
}


def find_reduction(op: str, dtype: torch.dtype) -> Reduction:
    """Return the Reduction of this name. Raises ValueError for an unknown name, and for a mean of integers."""
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} is not a reduction; use {one_of(REDUCTIONS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"op='mean' needs a floating point tensor, not {dtype}; use sum")
    return REDUCTIONS[op]


def exchange_and_add(
    comm: PointToPoint, send_chunk: torch.Tensor, to: int, mine: torch.Tensor, source: int,
    reduction: Reduction, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Send `send_chunk` to rank `to`, receive a chunk from rank `source`, and return out = mine + the received chunk.

    `mine`, `out` and the received chunk are flat tensors of equal length. Chunks are sent in segments, messages of at most
    SEGMENT_BYTES. `out` may be `mine` or `send_chunk` itself: a segment is overwritten only after it is read and sent.
    """
    length = max(1, SEGMENT_BYTES // send_chunk.element_size())
    longest = max(send_chunk.numel(), mine.numel())
    if longest <= length:
        received = comm.scratch(mine.numel(), mine.dtype)
        comm.exchange(send_chunk, to, received.shape, received.dtype, source, out=received)
        # The lower rank's first, since by doubling both ranks compute this, and the maximum of 0 and -0 is one of the two.
        first, second = (received, mine) if source < comm.rank else (mine, received)
        return reduction.combine(first, second, out=out)
    for start in range(0, longest, length):
        segment = slice(start, start + length)
        exchange_and_add(comm, send_chunk[segment], to, mine[segment], source, reduction, out[segment])
    return out
