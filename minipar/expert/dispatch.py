"""Dispatch of rows to the ranks of their experts by all-to-all, and the way back: combine.

`simple/moe.py`, plus overlap with a shared expert or with other rows' experts, and a two-level all-to-all.
"""

from __future__ import annotations

from torch import Tensor

from minipar.errors import require_positive
from minipar.expert.dispatched_rows import ChunkedRows, DispatchedRows
from minipar.expert.overlapped_all_to_all import AllToAllRoute


class AllToAll:
    """The `dispatch` of an `MoE` layer of which each rank of `comm` has num_experts / ep consecutive experts.

    rows       [R, D]   sorted by expert; R may differ between ranks, and may be 0
    counts     [E]      rows per expert
    overlap    send rows while the caller computes the shared expert, and their gradients while its backward runs
    node_size  None, or the ranks per node of a two-level all-to-all: see `overlapped_all_to_all.py`
    chunks     parts of the rows; one is computed while the others travel: see `dispatched_rows.py`. With more than one,
               everything overlaps, whatever `overlap` says

    Sends, for R rows spread evenly, (ep-1)/ep * R * D elements to dispatch and as many to combine, forward, and the same
    backward. Padded to capacity, R = E * groups * capacity, k * capacity_factor rows per token; without capacity, R is k
    rows per token. Besides, 8 E bytes of counts to each other rank, forward. The rows are chunks * (ep-1) messages
    each way.
    """

    def __init__(self, comm, overlap: bool = False, node_size: int | None = None, chunks: int = 1):
        require_positive(chunks=chunks)
        self.comm, self.overlap, self.chunks = comm, overlap, chunks
        self.route = AllToAllRoute(comm, node_size)

    def __call__(self, rows: Tensor, counts: Tensor) -> DispatchedRows | ChunkedRows:
        p = self.comm.size
        # The host waits: messages have the sizes that the routers chose. [source rank, target rank, its expert]
        sizes = self.comm.all_gather(counts).view(p, p, -1).tolist()
        if self.chunks > 1:
            return ChunkedRows(self.route, rows, sizes, self.chunks)
        return DispatchedRows(self.route, rows, sizes, self.overlap)
