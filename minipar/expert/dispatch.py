"""Rows travel to the ranks of their experts, and what the experts made of them travels back.

`simple/moe.py`, plus overlap with a shared expert, and two levels.

    each rank            rows for expert 0 | 1 | 2 | 3           sorted by expert, so by rank too
    all-to-all           from rank 0: 2 | 3, from rank 1: 2 | 3      (ep = 2, on rank 1)
    regroup              expert 2: from 0, 1 | expert 3: from 0, 1
    experts, regroup back, all-to-all back

Source: GShard, arXiv:2006.16668, section 3; sizes that differ, as in MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minipar.expert.overlapped_all_to_all import Exchange, Route, regroup


class AllToAll:
    """A `dispatch` for an `MoE` layer of which each rank of `comm` has num_experts / ep neighbouring experts.

    rows       [R, D]   sorted by expert; any number on any rank, none included
    counts     [E]      how many rows each expert has
    overlap    let rows travel while the caller computes (the shared expert), forward and backward
    node_size  None, or over how many neighbouring ranks to exchange first: see `exchange.py`

    Sends for R rows, evenly spread, (ep-1)/ep * R * D elements forth and as many back, forward, and the same backward.
    With buffers up to capacity R = E * groups * capacity, k * capacity_factor rows a token; without capacity R = k rows
    a token. Besides, 8 E bytes of counts to each other rank, forward.
    """

    def __init__(self, comm, overlap: bool = False, node_size: int | None = None):
        self.comm, self.overlap, self.route = comm, overlap, Route(comm, node_size)

    def __call__(self, rows: Tensor, counts: Tensor) -> DispatchedRows:
        p = self.comm.size
        sizes = self.comm.all_gather(counts).view(p, p, -1)  # [from rank, to rank, its expert]
        return DispatchedRows(self.route, rows, sizes, self.overlap)


class DispatchedRows:
    """Rows under way. sizes [ep, ep, E/ep]: how many rows each rank has for each expert of each rank."""

    def __init__(self, route: Route, rows: Tensor, sizes: Tensor, overlap: bool):
        self.route, self.between = route, sizes.sum(2).tolist()
        self.segments = sizes[:, route.comm.rank].tolist()  # [from rank][expert of mine]
        self.exchange = Exchange(route, self.between, overlap)
        self.left = self.exchange.depart(rows)

    def arrive(self) -> tuple[Tensor, Sequence[int]]:
        """The rows of all ranks for this rank's experts, sorted by expert, and how many each one has."""
        rows = self.exchange.arrive(self.left)
        return regroup(rows, self.segments), [sum(of_expert) for of_expert in zip(*self.segments)]

    def combine(self, out: Tensor) -> Tensor:
        """Bring each row's result to where the row came from: [R, D] in the order it was sent in."""
        out = regroup(out, list(zip(*self.segments)))
        exchange = Exchange(self.route, list(zip(*self.between)), overlap=False)
        return exchange.arrive(exchange.depart(out))
