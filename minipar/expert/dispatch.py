"""Rows travel to the ranks of their experts, and what the experts made of them travels back.

    each rank            rows for expert 0 | 1 | 2 | 3           sorted by expert, so by rank too
    all-to-all           from rank 0: 2 | 3, from rank 1: 2 | 3      (ep = 2, on rank 1)
    regroup              expert 2: from 0, 1 | expert 3: from 0, 1
    experts, regroup back, all-to-all back

Source: GShard, arXiv:2006.16668, section 3.2; sizes that differ, as in MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from minipar.comm import differentiable


class AllToAll:
    """A `dispatch` for a `SwitchMoE` of which each rank of `comm` has num_experts / ep neighbouring experts.

    rows    [R, D]   sorted by expert; any number on any rank, none included
    counts  [E]      how many rows each expert has
    overlap          let rows travel while the caller computes (the shared expert), forward and backward

    Sends for R rows, evenly spread, (ep-1)/ep * R * D elements forth and as many back, forward, and the same backward.
    With buffers up to capacity R = E * groups * capacity, k * capacity_factor rows a token; without capacity R = k rows
    a token. Besides, 8 E bytes of counts to each other rank, forward.
    """

    def __init__(self, comm, overlap: bool = False):
        self.comm, self.overlap = comm, overlap

    def __call__(self, rows: Tensor, counts: Tensor) -> Journey:
        sizes = self.comm.all_gather(counts).view(self.comm.size, -1)  # [from rank, to expert]
        return Journey(self.comm, rows, sizes, self.overlap)


class Journey:
    """Rows under way. sizes [ep, E]: how many rows each rank has for each expert."""

    def __init__(self, comm, rows: Tensor, sizes: Tensor, overlap: bool):
        self.comm = comm
        between = sizes.view(comm.size, comm.size, -1)  # [from rank, to rank, its expert]
        self.sent = between[comm.rank].sum(1).tolist()
        self.received = between[:, comm.rank].sum(1).tolist()
        self.segments = between[:, comm.rank].tolist()  # [from rank][my expert]
        self.exchange = _Exchange(comm, self.sent, self.received, overlap)
        self.left = _Depart.apply(rows, self.exchange)

    def arrive(self) -> tuple[Tensor, Sequence[int]]:
        """The rows of all ranks for this rank's experts, sorted by expert, and how many each one has."""
        rows = _Arrive.apply(self.left, self.exchange)
        return regroup(rows, self.segments), [sum(of_expert) for of_expert in zip(*self.segments)]

    def go_back(self, out: Tensor) -> Tensor:
        """Bring each row's result to where the row came from: [R, D] in the order it was sent in."""
        out = regroup(out, list(zip(*self.segments)))
        return differentiable.all_to_all(self.comm, out, self.received, self.sent)


def regroup(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows in segments ordered (i, j), of sizes[i][j], reordered to (j, i). Its inverse is itself with sizes transposed."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return rows
    segments = rows.split([size for of_i in sizes for size in of_i])
    width = len(sizes[0])
    return torch.cat([segments[i * width + j] for j in range(width) for i in range(len(sizes))])


class _Exchange:
    """An all-to-all that is begun in one place and finished in another; backward, it goes the other way."""

    def __init__(self, comm, sent, received, overlap: bool):
        self.comm, self.sizes, self.overlap = comm, (sent, received), overlap
        self._pending = None

    def begin(self, x: Tensor, back: bool = False) -> None:
        sizes = self.sizes[::-1] if back else self.sizes
        self._pending = self.comm.all_to_all(x, *sizes, async_op=self.overlap)

    def finish(self) -> Tensor:
        pending, self._pending = self._pending, None
        return pending.wait() if self.overlap else pending


class _Depart(Function):
    """Together with `_Arrive` one exchange. What is computed between the two overlaps it, and since backward walks in
    the other order, so does its backward."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        exchange.begin(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, _):
        return ctx.exchange.finish(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx, left, exchange):
        ctx.exchange, ctx.shape = exchange, left.shape
        return exchange.finish()

    @staticmethod
    def backward(ctx, grad):
        ctx.exchange.begin(grad, back=True)
        return grad.new_zeros(()).expand(ctx.shape), None  # `_Depart` has the real one
