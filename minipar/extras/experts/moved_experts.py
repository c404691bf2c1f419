"""Dispatch to experts that are moved between ranks, with their state, when the ranks' loads differ.

    each step     counts of rows per expert add up on every rank
    every k-th    after the update counts are all-reduced, every rank chooses the same placement (expert_balance.py), and
                  weights and optimizer states of the experts that change their rank are sent

From then on each tensor's `Placement.rows` says which experts it has, for checkpoints, norms and verification. Routing and
the numbers of the model do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.data_parallel.optimizer_interface import OptimizerInterface
from minipar.expert.dispatch import AllToAll
from minipar.expert.dispatched_rows import DispatchedRows, RunExperts
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.extras.experts.expert_balance import balanced
from minipar.mesh import placement_of, set_placement
from minipar.model.moe import MoE, moe_layers
from minipar.train.parallelize import RankState


class PlacedAllToAll(AllToAll):
    """The `dispatch` of an `MoE` layer whose experts may be on any rank: E/ep of them on each rank of `comm`.

    experts  the expert of each slot: `expert_balance.py`
    load     [E] int64: rows of this rank for each expert since `balance_experts` last read them

    The other arguments are as for `AllToAll`. Sends what `AllToAll` sends of rows that are not padded to capacity.
    """

    def __init__(self, comm: Comm, num_experts: int, overlap: bool = False, node_size: int | None = None):
        super().__init__(comm, overlap, node_size)
        self.experts = tuple(range(num_experts))
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=comm.device)

    def __call__(self, rows: Tensor, counts: Tensor) -> PlacedRows:
        self.load += counts
        sizes = [list(chain.from_iterable(source)) for source in self.row_counts(counts)]
        return PlacedRows(self.route, rows, sizes, self.comm.rank, self.experts, self.overlap)


class PlacedRows:
    """Rows under way, sorted by slot, not by expert. sizes: rows [source rank][expert]."""

    def __init__(
        self, route: AllToAllRoute, rows: Tensor, sizes: list[list[int]], rank: int, experts: Sequence[int],
        overlap: bool,
    ):  # fmt: skip
        n = len(experts) // len(sizes)
        by_slot = [[source[e] for e in experts] for source in sizes]
        by_rank = [[slots[s : s + n] for s in range(0, len(slots), n)] for slots in by_slot]
        self.experts, self.counts = experts, by_slot[rank]
        parts = torch.split(rows, sizes[rank])
        self.dispatched = DispatchedRows(route, torch.cat([parts[e] for e in experts]), by_rank, overlap)

    def through(self, experts: RunExperts) -> Tensor:
        """Return the experts' outputs, [R, D], in the order of the rows."""
        parts = torch.split(self.dispatched.through(experts), self.counts)
        slot_of = {expert: slot for slot, expert in enumerate(self.experts)}
        return torch.cat([parts[slot_of[e]] for e in range(len(self.experts))])


@torch.no_grad()
def balance_experts(config: TrainConfig, state: RankState, step: int) -> None:
    """Move experts at the end of a step, if it is the turn of one. All ranks of dp x cp must call this.

    For each layer with experts, all-reduces E int64 numbers, and sends for each expert that leaves this rank its 3 D F/tp
    weights and all optimizer state of them, in their own dtypes: with Adam in mixed precision 2 + 12 bytes each.
    """
    if (step + 1) % config.options["dispatch"].every:
        return
    ep, sharers = state.mesh.comm("ep"), state.mesh.comm("dp", "cp")
    for stage in state.stages:
        for _, moe in moe_layers(stage):
            dispatch = moe.overrides.dispatch
            if isinstance(dispatch, PlacedAllToAll):
                loads = sharers.all_reduce(dispatch.load).tolist()
                dispatch.load.zero_()
                move_experts(ep, moe, dispatch, balanced(loads, dispatch.experts, ep.size), state.optimizer)


def move_experts(
    ep: Comm, moe: MoE, dispatch: PlacedAllToAll, experts: Sequence[int], optimizer: OptimizerInterface
) -> None:
    """Bring experts[s] to slot s, with all its state, in place, and correct the placements. All ranks of ep call this."""
    if experts == dispatch.experts:
        return
    n, rank = len(experts) // ep.size, ep.rank
    old, new = (list(slots[rank * n : (rank + 1) * n]) for slots in (dispatch.experts, experts))
    target = {e: slot // n for slot, e in enumerate(experts)}
    source = {e: slot // n for slot, e in enumerate(dispatch.experts)}
    # Messages between two ranks have their experts in the order of their numbers.
    leaving, arriving = sorted(old, key=lambda e: (target[e], e)), sorted(new, key=lambda e: (source[e], e))
    sent, received = ([ranks.count(peer) for peer in range(ep.size)] for ranks in (
        [target[e] for e in old], [source[e] for e in new],
    ))  # fmt: skip
    placed, states = _tensors_of(moe, optimizer)
    for x in {x.data_ptr(): x for x in (*placed, *states)}.values():  # a parameter may be its own master
        rows = x.view(n, -1)
        out = rows[[old.index(e) for e in leaving]]
        rows[[new.index(e) for e in arriving]] = ep.all_to_all(out, sent, received)
    for x in placed:
        set_placement(x, placement_of(x).with_rows(new))
    dispatch.experts = tuple(experts)


def _tensors_of(moe: MoE, optimizer: OptimizerInterface) -> tuple[list[Tensor], list[Tensor]]:
    """Return the layer's tensors with a row per expert: those that have placements, and optimizer states."""
    parameters = list(moe.experts.parameters())
    names = {placement_of(p).name for p in parameters}
    own = [(x, slots) for x, slots in optimizer.tensors_and_states() if placement_of(x).name in names]
    updated = [x for x in optimizer.tensors if placement_of(x).name in names]
    placed = list({id(x): x for x in (*parameters, *updated, *(x for x, _ in own))}.values())
    values = (value for _, slots in own for value in slots.values())
    return placed, [value for value in values if isinstance(value, Tensor) and value.dim()]
