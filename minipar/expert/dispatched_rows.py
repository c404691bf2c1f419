"""Rows that are being dispatched to the ranks of their experts, in one all-to-all.

    each rank            rows for expert 0 | 1 | 2 | 3           sorted by expert, so by rank too
    all-to-all           from rank 0: 2 | 3, from rank 1: 2 | 3      (ep = 2, on rank 1)
    regroup              expert 2: from 0, 1 | expert 3: from 0, 1
    experts, regroup back, all-to-all back

Source: GShard, arXiv:2006.16668, section 3; messages of different sizes, as in MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from minipar.expert.overlapped_all_to_all import AllToAllRoute, OverlappedAllToAll, transpose_segments

# sizes[source rank][target rank][expert of the target]: rows
RowCounts = Sequence[Sequence[Sequence[int]]]
# (rows of this rank's experts, rows per expert) -> as many output rows
RunExperts = Callable[[Tensor, Sequence[int]], Tensor]


class DispatchedRows:
    """Rows on their way to the ranks of their experts, in one all-to-all.

    rows     [R, D]   sorted by expert
    overlap  send the rows while the caller computes something else; `receive` waits for them
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
        """Start to send each row's result to the row's source rank; return a function that waits for this rank's results.

        These results are [R, D], in the order in which the rows were dispatched.
        """
        exchange = OverlappedAllToAll(self.route, list(zip(*self.between)), overlap)
        left = exchange.start(transpose_segments(out, list(zip(*self.segments))))
        return partial(exchange.receive, left)

    def combine(self, out: Tensor) -> Tensor:
        """Send each row's result back, and return this rank's results: see `send_back`."""
        return self.send_back(out)()

    def through(self, experts: RunExperts) -> Tensor:
        """Return the experts' outputs, [R, D], in the order of the rows."""
        return self.combine(experts(*self.receive()))
