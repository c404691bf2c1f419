"""Dispatch of rows to the ranks of their experts by all-to-all, and the way back: combine.

Adds to `simple/dispatch.py`: overlap with a shared expert; all-to-all in two levels. More ways: `minipar.extras.experts`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from minipar.comm import Comm
from minipar.expert.dispatched_rows import DispatchedRows, RowCounts
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.model.moe import MoE
from minipar.model.overrides import Dispatched


class Installer(Protocol):
    """A function that installs a dispatch, named by `--dispatch`, in an MoE layer sharded over `ep`.

    overlap  send rows while the shared expert computes
    options  the choice's options, such as NodeOptions
    """

    def __call__(self, moe: MoE, ep: Comm, overlap: bool, options: Any) -> None: ...


def install(moe: MoE, ep: Comm, overlap: bool, options: Any) -> None:
    """Install `AllToAll` in an MoE layer. This function is an `Installer`."""
    moe.overrides.dispatch = AllToAll(ep, overlap, options.node_size)
    moe.overrides.pad_to_capacity = True


class AllToAll:
    """The `dispatch` of an `MoE` layer of which each rank of `comm` has num_experts / ep consecutive experts.

    rows       [R, D]   sorted by expert; R may differ between ranks, and may be 0
    counts     [E]      rows per expert
    overlap    send rows while the caller computes the shared expert, and their gradients while its backward runs
    node_size  None, or the ranks per node of a two-level all-to-all: see `overlapped_all_to_all.py`

    For R rows spread evenly, the forward sends (ep-1)/ep * R * D elements to dispatch and as many to combine; so does the
    backward. With rows padded to capacity, R = E * groups * capacity, which is k * capacity_factor rows per token; without
    capacity, R is k rows per token. The forward also sends 8 E bytes of counts to each other rank.
    """

    def __init__(self, comm: Comm, overlap: bool = False, node_size: int | None = None):
        self.comm, self.overlap = comm, overlap
        self.route = AllToAllRoute(comm, node_size)

    def row_counts(self, counts: Tensor) -> RowCounts:
        """Return the numbers of rows [source rank][target rank][target's expert].

        The host waits for them, because they are the sizes of the messages.
        """
        p = self.comm.size
        rows: RowCounts = self.comm.all_gather(counts).view(p, p, -1).tolist()
        return rows

    def __call__(self, rows: Tensor, counts: Tensor) -> Dispatched:
        return DispatchedRows(self.route, rows, self.row_counts(counts), self.overlap)
