"""Dispatch of rows to the ranks of their experts by all-to-all, and the way back: combine.

`simple/moe.py`, plus overlap with a shared expert, and a two-level all-to-all.

    each rank            rows for expert 0 | 1 | 2 | 3           sorted by expert, so by rank too
    all-to-all           from rank 0: 2 | 3, from rank 1: 2 | 3      (ep = 2, on rank 1)
    regroup              expert 2: from 0, 1 | expert 3: from 0, 1
    experts, regroup back, all-to-all back

Source: GShard, arXiv:2006.16668, section 3; messages of different sizes, as in MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minipar.expert.overlapped_all_to_all import AllToAllRoute, OverlappedAllToAll, transpose_segments


class AllToAll:
    """The `dispatch` of an `MoE` layer of which each rank of `comm` has num_experts / ep consecutive experts.

    rows       [R, D]   sorted by expert; R may differ between ranks, and may be 0
    counts     [E]      rows per expert
    overlap    send rows while the caller computes the shared expert, and their gradients while its backward runs
    node_size  None, or the ranks per node of a two-level all-to-all: see `overlapped_all_to_all.py`

    Sends, for R rows spread evenly, (ep-1)/ep * R * D elements to dispatch and as many to combine, forward, and the same
    backward. Padded to capacity, R = E * groups * capacity, k * capacity_factor rows per token; without capacity, R is k
    rows per token. Besides, 8 E bytes of counts to each other rank, forward.
    """

    def __init__(self, comm, overlap: bool = False, node_size: int | None = None):
        self.comm, self.overlap, self.route = comm, overlap, AllToAllRoute(comm, node_size)

    def __call__(self, rows: Tensor, counts: Tensor) -> DispatchedRows:
        p = self.comm.size
        sizes = self.comm.all_gather(counts).view(p, p, -1)  # [source rank, target rank, its expert]
        return DispatchedRows(self.route, rows, sizes, self.overlap)


class DispatchedRows:
    """Rows being dispatched. sizes [ep, ep, E/ep]: rows from each source rank for each expert of each target rank."""

    def __init__(self, route: AllToAllRoute, rows: Tensor, sizes: Tensor, overlap: bool):
        by_expert = sizes.tolist()  # the host waits: messages have the sizes that the routers chose
        self.route, self.between = route, [[sum(of_target) for of_target in source] for source in by_expert]
        self.segments = [source[route.comm.rank] for source in by_expert]  # [source rank][own expert]
        self.exchange = OverlappedAllToAll(route, self.between, overlap)
        self.left = self.exchange.start(rows)

    def receive(self) -> tuple[Tensor, Sequence[int]]:
        """Return all ranks' rows for this rank's experts, sorted by expert, and the number of rows per expert."""
        rows = self.exchange.receive(self.left)
        return transpose_segments(rows, self.segments), [sum(of_expert) for of_expert in zip(*self.segments)]

    def combine(self, out: Tensor) -> Tensor:
        """Send each row's result back to the row's source rank: [R, D], in the order in which rows were dispatched."""
        out = transpose_segments(out, list(zip(*self.segments)))
        exchange = OverlappedAllToAll(self.route, list(zip(*self.between)), overlap=False)
        return exchange.receive(exchange.start(out))
