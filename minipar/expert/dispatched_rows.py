"""Rows that are being dispatched to the ranks of their experts: all at once, or in chunks beside the experts' products.

    each rank            rows for expert 0 | 1 | 2 | 3           sorted by expert, so by rank too
    all-to-all           from rank 0: 2 | 3, from rank 1: 2 | 3      (ep = 2, on rank 1)
    regroup              expert 2: from 0, 1 | expert 3: from 0, 1
    experts, regroup back, all-to-all back

In chunks, each expert's rows are cut into c parts, and part i of every expert makes chunk i:

    messages   chunk 0 there | chunk 1 there | chunk 2 there | 0 back | 1 back | 2 back
    products                 |    chunk 0    |    chunk 1    |    chunk 2    |

All chunks are on their way from the start, one after another, as a Comm is a stream; each result follows as soon as it is
there. So while chunk i is computed, chunk i+1 arrives, and the result of chunk i-1 leaves once no chunk waits to arrive.
The backward is the same from last to first: autograd starts the gradients of all results, and runs a chunk's backward when
its own have arrived.
Source: GShard, arXiv:2006.16668, section 3; messages of different sizes, as in MegaBlocks, arXiv:2211.15841. Chunks: Tutel,
arXiv:2206.03382 (adaptive pipelining); FasterMoE, doi:10.1145/3503221.3508418 (smart schedule), which cuts by ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minipar.expert.overlapped_all_to_all import AllToAllRoute, OverlappedAllToAll, transpose_segments
from minipar.trace import span

# sizes[source rank][target rank][expert of the target]: rows
RowCounts = Sequence[Sequence[Sequence[int]]]
# (rows of this rank's experts, rows per expert) -> as many rows
RunExperts = Callable[[Tensor, Sequence[int]], Tensor]


class DispatchedRows:
    """Rows on their way to the ranks of their experts, in one all-to-all.

    rows     [R, D]   sorted by expert
    overlap  send them while the caller computes something else; `receive` waits
    """

    def __init__(self, route: AllToAllRoute, rows: Tensor, sizes: RowCounts, overlap: bool):
        self.route, self.between = route, [[sum(of_target) for of_target in source] for source in sizes]
        self.segments = [source[route.comm.rank] for source in sizes]  # [source rank][own expert]
        self.exchange = OverlappedAllToAll(route, self.between, overlap)
        self.left = self.exchange.start(rows)

    def receive(self) -> tuple[Tensor, Sequence[int]]:
        """Return all ranks' rows for this rank's experts, sorted by expert, and the number of rows per expert."""
        rows = self.exchange.receive(self.left)
        return transpose_segments(rows, self.segments), [sum(of_expert) for of_expert in zip(*self.segments)]

    def send_back(self, out: Tensor, overlap: bool = False) -> Callable[[], Tensor]:
        """Start to send each row's result to the row's source rank; return a function that waits for this rank's own.

        They are [R, D], in the order in which the rows were dispatched.
        """
        exchange = OverlappedAllToAll(self.route, list(zip(*self.between)), overlap)
        left = exchange.start(transpose_segments(out, list(zip(*self.segments))))
        return partial(exchange.receive, left)

    def combine(self, out: Tensor) -> Tensor:
        """Send each row's result back, and return this rank's own: see `send_back`."""
        return self.send_back(out)()

    def through(self, experts: RunExperts) -> Tensor:
        """Return what `experts` make of the rows, [R, D], in the order of the rows."""
        return self.combine(experts(*self.receive()))


class ChunkedRows:
    """Rows on their way in chunks, each an all-to-all of its own; arguments as of `DispatchedRows`.

    Chunk i of c has rows n*i//c to n*(i+1)//c of the n that a rank has for an expert.

    The bytes are those of one chunk, in c times as many messages (fewer, where a rank has fewer than c rows for another).
    Memory too: the backward keeps all rows, in chunks or not.
    A weight's gradient is the sum of c products, so it differs from one chunk's by rounding; so may a row's result, as a
    matrix product may add in another order where it has fewer rows. The copies in and out of chunks are bitwise.
    """

    def __init__(self, route: AllToAllRoute, rows: Tensor, sizes: RowCounts, chunks: int):
        self.trace = route.comm.trace
        by_chunk = [_chunk_of(sizes, i, chunks) for i in range(chunks)]
        self.own = [[n for target in part[route.comm.rank] for n in target] for part in by_chunk]
        rows = transpose_segments(rows, list(zip(*self.own)))  # from (expert, chunk) to (chunk, expert)
        parts = rows.split([sum(of_chunk) for of_chunk in self.own])
        self.chunks = [
            DispatchedRows(route, part, counts, overlap=True) for part, counts in zip(parts, by_chunk)
        ]

    def through(self, experts: RunExperts) -> Tensor:
        """Return what `experts` make of the rows, [R, D], in the order of the rows."""
        arriving = []
        for i, chunk in enumerate(self.chunks):
            rows, counts = chunk.receive()
            with span(self.trace, "compute", f"experts, chunk {i}"):
                out = experts(rows, counts)
            arriving.append(chunk.send_back(out, overlap=True))
        return transpose_segments(torch.cat([wait() for wait in arriving]), self.own)


def _chunk_of(sizes: RowCounts, i: int, chunks: int) -> list[list[list[int]]]:
    """Return the rows of chunk i, counted as in `sizes`."""
    return [
        [[n * (i + 1) // chunks - n * i // chunks for n in of_target] for of_target in source]
        for source in sizes
    ]
