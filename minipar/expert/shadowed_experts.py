"""Dispatch in which the rows of hot experts stay where they are, and the weights of these experts come to the rows.

    counts     all-gathered, so every rank chooses the same experts (shadow_placement.py)
    forward    a hot expert's owner broadcasts its weights; each rank computes its own rows for it; other rows are sent
    backward   the weights' gradients are summed on the owner, which adds those of a hot expert to its own: nothing else
               changes for the optimizer, for checkpoints, or for the next step, which may choose others

Source: FasterMoE, doi:10.1145/3503221.3508418 (dynamic shadowing).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from minipar.expert.dispatched_rows import DispatchedRows
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.expert.shadow_placement import choose_shadowed
from minipar.model.grouped_mlp import Experts, grouped_swiglu


class ShadowedAllToAll:
    """The `dispatch` of an `MoE` layer of which each rank of `comm` has num_experts / ep consecutive experts.

    break_even  rows that a replica must take off the busiest rank: `break_even_rows` of the machine
    others      as of `AllToAll`

    Sends, besides the rows that go to experts which are not hot, as `AllToAll`: all ranks together ep-1 times the 3 D F
    weights of each hot expert forward, and as many gradients backward.
    Results are bitwise those of `AllToAll` where products of fewer rows add in the same order; gradients of a hot expert's
    weights are added rank by rank, so they differ by rounding.
    """

    def __init__(self, comm, break_even: float, overlap: bool = False, node_size: int | None = None):
        self.comm, self.break_even, self.overlap = comm, break_even, overlap
        self.route = AllToAllRoute(comm, node_size)

    def __call__(self, rows: Tensor, counts: Tensor) -> ShadowedRows:
        # The host waits, as in `AllToAll`. [source rank][expert]
        sizes = self.comm.all_gather(counts).view(self.comm.size, -1).tolist()
        return ShadowedRows(self.route, rows, sizes, choose_shadowed(sizes, self.break_even), self.overlap)


class ShadowedRows:
    """Rows of which some are dispatched, and those of the experts `hot` stay. sizes [source rank][expert]: rows."""

    def __init__(
        self, route: AllToAllRoute, rows: Tensor, sizes: list[list[int]], hot: Sequence[int], overlap: bool
    ):
        self.comm, self.hot, self.sizes = route.comm, hot, sizes[route.comm.rank]
        self.num_own = len(self.sizes) // self.comm.size
        staying, leaving = _divide(rows, self.sizes, hot)
        cold = [[0 if e in hot else n for e, n in enumerate(source)] for source in sizes]
        by_target = [
            [source[e : e + self.num_own] for e in range(0, len(source), self.num_own)] for source in cold
        ]
        self.staying = staying
        self.dispatched = DispatchedRows(route, leaving, by_target, overlap)

    def through(self, experts: Experts) -> Tensor:
        """Return what the experts make of the rows, [R, D], in the order of the rows."""
        stayed = self._through_replicas(experts)
        came_back = self.dispatched.through(experts)
        return _join(stayed, came_back, self.sizes, self.hot)

    def _through_replicas(self, experts: Experts) -> Tensor:
        if not self.hot:
            return self.staying
        replicas = [self._replica(experts, e) for e in self.hot]
        weights = (torch.stack(of_experts) for of_experts in zip(*replicas))
        return grouped_swiglu(self.staying, *weights, [self.sizes[e] for e in self.hot])

    def _replica(self, experts: Experts, e: int) -> list[Tensor]:
        """Return gate, up and down of expert e, in one message from its owner, which gets the sum of their gradients."""
        weights = experts.gate, experts.up, experts.down
        owner, place = divmod(e, self.num_own)
        if owner == self.comm.rank:
            flat = torch.cat([w[place].flatten() for w in weights])
        else:  # its values are not read; it makes the backward run on every rank
            flat = weights[0].new_empty(sum(w[0].numel() for w in weights))
            flat.requires_grad_(weights[0].requires_grad)
        parts = _Replicate.apply(flat, self.comm, owner).split([w[0].numel() for w in weights])
        return [part.view_as(w[0]) for part, w in zip(parts, weights)]


class _Replicate(Function):
    """The root's x on every rank, each of which uses it for its own rows. Backward: the sum of gradients, on the root."""

    @staticmethod
    def forward(ctx, x, comm, root):
        ctx.comm, ctx.root = comm, root
        return comm.broadcast(x, root)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.reduce(grad, ctx.root), None, None


def _divide(rows: Tensor, sizes: Sequence[int], hot: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Divide rows, sorted by expert, into those of the experts `hot` and the others."""
    by_expert = rows.split(list(sizes))
    return tuple(
        torch.cat([rows[:0], *(part for e, part in enumerate(by_expert) if (e in hot) == is_hot)])
        for is_hot in (True, False)
    )


def _join(hot_rows: Tensor, others: Tensor, sizes: Sequence[int], hot: Sequence[int]) -> Tensor:
    """Undo `_divide`."""
    of_hot = iter(hot_rows.split([sizes[e] for e in hot]))
    of_others = iter(others.split([n for e, n in enumerate(sizes) if e not in hot]))
    return torch.cat([next(of_hot if e in hot else of_others) for e in range(len(sizes))])
