"""Dispatch in which rows for hot experts stay on their ranks; instead, the weights of hot experts are sent to all ranks.

    counts     are all-gathered, so that every rank chooses the same hot experts (shadow_placement.py)
    forward    a hot expert's owner broadcasts its weights; each rank computes its own rows for it; other rows are sent
    backward   the owner of a hot expert sums the gradients of all replicas. So the optimizer and checkpoints see no
               replicas, and the next step may choose other experts

Source: FasterMoE, doi:10.1145/3503221.3508418 (dynamic shadowing).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from minipar.comm import Comm
from minipar.expert.dispatch import AllToAll
from minipar.expert.dispatched_rows import DispatchedRows, RunExperts
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.extras.experts.shadow_placement import choose_shadowed
from minipar.model.grouped_mlp import Experts, grouped_swiglu


class ShadowedAllToAll(AllToAll):
    """The `dispatch` of an `MoE` layer. Each rank of `comm` has num_experts / ep consecutive experts of the layer.

    break_even  a replica must reduce the busiest rank's rows by more than this: the machine's `break_even_rows`

    The other arguments are those of `AllToAll`. Sends the rows of the other experts as `AllToAll` does. In addition, all
    ranks together send ep-1 times the 3 D F weights of each hot expert forward, and as many gradients backward.
    Outputs are bitwise equal to those of `AllToAll` if products of fewer rows add in the same order. Gradients of a hot
    expert's weights are added rank by rank, so they differ by rounding.
    """

    def __init__(self, comm: Comm, break_even: float, overlap: bool = False, node_size: int | None = None):
        super().__init__(comm, overlap, node_size)
        self.break_even = break_even

    def __call__(self, rows: Tensor, counts: Tensor) -> ShadowedRows:
        sizes = [list(chain.from_iterable(source)) for source in self.row_counts(counts)]
        return ShadowedRows(self.route, rows, sizes, choose_shadowed(sizes, self.break_even), self.overlap)


class ShadowedRows:
    """Rows on their way: those for the experts `hot` stay, and the others are dispatched.

    sizes  [source rank][expert], number of rows
    """

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

    def through(self, experts: RunExperts) -> Tensor:
        """Return the experts' outputs, [R, D], in the order of the rows."""
        assert isinstance(experts, Experts), "replicas are made of their weights"
        stayed = self._through_replicas(experts)
        came_back = self.dispatched.through(experts)
        return _join(stayed, came_back, self.sizes, self.hot)

    def _through_replicas(self, experts: Experts) -> Tensor:
        if not self.hot:
            return self.staying
        replicas = [self._replica(experts, e) for e in self.hot]
        gate, up, down = (torch.stack(of_experts) for of_experts in zip(*replicas))
        return grouped_swiglu(self.staying, gate, up, down, [self.sizes[e] for e in self.hot])

    def _replica(self, experts: Experts, e: int) -> list[Tensor]:
        """Return gate, up and down of expert e, broadcast by its owner. The backward sums the gradients on the owner."""
        weights = experts.gate, experts.up, experts.down
        owner, place = divmod(e, self.num_own)
        if owner == self.comm.rank:
            flat = torch.cat([w[place].flatten() for w in weights])
        else:  # a placeholder that requires a gradient, so that every rank runs the backward's collective
            flat = weights[0].new_empty(sum(w[0].numel() for w in weights))
            flat.requires_grad_(weights[0].requires_grad)
        replica: Tensor = _Replicate.apply(flat, self.comm, owner)  # type: ignore[no-untyped-call]
        parts = torch.split(replica, [w[0].numel() for w in weights])
        return [part.view_as(w[0]) for part, w in zip(parts, weights)]


class _Replicate(Function):
    """Broadcast the root's x to every rank. Backward: reduce the gradients to the root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        y: Tensor = comm.broadcast(x, root)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce(grad, ctx.root), None, None


def _divide(rows: Tensor, sizes: Sequence[int], hot: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Divide rows, sorted by expert, into the rows of the experts `hot` and all other rows."""
    by_expert = torch.split(rows, list(sizes))
    of_hot = [part for e, part in enumerate(by_expert) if e in hot]
    of_others = [part for e, part in enumerate(by_expert) if e not in hot]
    return torch.cat([rows[:0], *of_hot]), torch.cat([rows[:0], *of_others])


def _join(hot_rows: Tensor, others: Tensor, sizes: Sequence[int], hot: Sequence[int]) -> Tensor:
    """Undo `_divide`."""
    of_hot = iter(torch.split(hot_rows, [sizes[e] for e in hot]))
    of_others = iter(torch.split(others, [n for e, n in enumerate(sizes) if e not in hot]))
    return torch.cat([next(of_hot if e in hot else of_others) for e in range(len(sizes))])
