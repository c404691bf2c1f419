"""An all-to-all that one call starts and another finishes, so that it overlaps with computation, in one level or in two.

    one level    every rank sends to every other rank: p - 1 messages of n/p
    two levels   inside a node of g ranks, rows go to the rank with the target's local rank; then, across nodes, one message
                 per target has all the node's rows for it: g - 1 messages of n/g and p/g - 1 of g n/p

Two levels send up to twice the bytes, but only 1/g of the messages cross the slow link, each g times as large.
Source of two levels: DeepSpeed-MoE, arXiv:2201.05596 (hierarchical all-to-all: O(g + p/g) hops, not O(p)); Tutel,
arXiv:2206.03382 (2DH all-to-all).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from minipar.comm import Comm
from minipar.comm.autograd import refuse_second_derivatives
from minipar.support.errors import require_divides

Sizes = Sequence[Sequence[int]]


class AllToAllRoute:
    """An all-to-all over the ranks of `comm`: in one level, or in two if `node_size` is given.

    Raises ValueError if node_size does not divide the number of ranks.
    """

    def __init__(self, comm: Comm, node_size: int | None = None):
        self.comm = comm
        self.in_levels = node_size is not None
        self.node_size = node_size or 1
        if node_size is not None:
            require_divides("node_size", node_size, "ep", comm.size)
            self.node, self.place = divmod(comm.rank, node_size)
            members = range(self.node * node_size, (self.node + 1) * node_size)
            self.inside = comm.subgroup(members, f"node of {node_size}")
            self.across = comm.subgroup(
                range(self.place, comm.size, node_size), f"across nodes of {node_size}"
            )

    def begin(self, x: Tensor, sizes: Sizes, async_op: bool) -> Any:
        """Send rows, sorted by target rank; return the received rows, sorted by source rank, or a handle for them.

        sizes [p][p]: rows from each source rank to each target rank. With two levels, only the second is asynchronous.
        """
        if not self.in_levels:
            received = [row[self.comm.rank] for row in sizes]
            return self.comm.all_to_all(x, sizes[self.comm.rank], received, async_op=async_op)
        return self._begin_across(self._send_inside(x, sizes), sizes, async_op)

    def _send_inside(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Send rows for local rank j of any node to local rank j of this node; return the received rows by target node."""
        g, nodes = self.node_size, range(0, self.comm.size, self.node_size)
        by_place = [[sizes[self.comm.rank][n + j] for j in range(g)] for n in nodes]
        received = [[sizes[self.node * g + i][n + self.place] for n in nodes] for i in range(g)]
        x = self.inside.all_to_all(
            transpose_segments(x, by_place), [sum(s) for s in zip(*by_place)], [sum(s) for s in received]
        )
        return transpose_segments(x, received)

    def _begin_across(self, x: Tensor, sizes: Sizes, async_op: bool) -> Any:
        g, nodes = self.node_size, range(0, self.comm.size, self.node_size)
        sent = [sum(sizes[self.node * g + i][n + self.place] for i in range(g)) for n in nodes]
        received = [sum(sizes[n + i][self.comm.rank] for i in range(g)) for n in nodes]
        return self.across.all_to_all(x, sent, received, async_op=async_op)


class OverlappedAllToAll:
    """One differentiable all-to-all in two halves: `start` starts it, `receive` waits for it.

    Computation between the two calls overlaps with the all-to-all. The same holds in the backward: autograd first runs the
    backward of `receive`, which starts the gradients' all-to-all, and later that of `start`, which waits for this
    all-to-all.
    """

    def __init__(self, route: AllToAllRoute, sizes: Sizes, overlap: bool):
        self.route, self.sizes, self.overlap = route, sizes, overlap
        self._pending: Any = None

    def start(self, x: Tensor) -> Tensor:
        """Start to send x. Pass the result to `receive`, and use it for nothing else."""
        y: Tensor = _Start.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def receive(self, left: Tensor) -> Tensor:
        """Wait for the all-to-all and return the rows that this rank received."""
        y: Tensor = _Wait.apply(left, self)  # type: ignore[no-untyped-call]
        return y

    def begin(self, x: Tensor, sizes: Sizes) -> None:
        self._pending = self.route.begin(x, sizes, self.overlap)

    def finish(self) -> Tensor:
        pending, self._pending = self._pending, None
        received: Tensor = pending.wait() if self.overlap else pending
        return received


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: OverlappedAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(x, exchange.sizes)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, exchange: OverlappedAllToAll) -> Tensor:
        ctx.exchange, ctx.shape = exchange, left.shape
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives("an overlapped all-to-all")
        ctx.exchange.begin(grad, list(zip(*ctx.exchange.sizes)))
        # A placeholder of the right shape: the gradient itself comes from `_Start.backward`.
        return grad.new_zeros(()).expand(ctx.shape), None


def transpose_segments(rows: Tensor, sizes: Sizes) -> Tensor:
    """Reorder segments of sizes[i][j] rows from order (i, j) to (j, i). The inverse is the same with sizes transposed."""
    width = len(sizes[0])
    if len(sizes) == 1 or width == 1:
        return rows
    segments = torch.split(rows, [size for of_i in sizes for size in of_i])
    return torch.cat([segments[i * width + j] for j in range(width) for i in range(len(sizes))])
