"""ZeRO with complete parameters as shards: every parameter, with its state, belongs to one rank.

    flat shards   | w1 ........|... w2 ..|... w3 ....... |     exactly equal shards, but ranks have parts of matrices
    whole         | w1 ............ | w2 ... | w3 ...... |     nearly equal shards of complete matrices (Muon, Shampoo)

The parameters are assigned from the most expensive to the cheapest, each to the rank with the least work so far. The
largest share of the work is then at most the mean plus the most expensive parameter, and at most 4/3 - 1/(3p) times the
best possible (Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.zero import ZeroOptimizer
from minipar.extras.optimizers.muon import ADAMW, newton_schulz_flops
from minipar.mesh import Placement, placement_of

Group = dict[str, Any]

ADAMW_FLOPS = 12  # FLOPs per updated element


class WholeParameterZero(ZeroOptimizer):
    """A `ZeroOptimizer` whose shards are complete parameters, for an `optimizer_cls` that needs unsharded matrices.

    cost   a function from (parameter, its group) to the work of its update; the default is Muon's FLOPs

    The time of a rank's update is proportional to its share of the work; `balance` says how equal the shares are. All ranks
    together send as much as with ZeroOptimizer. In a ring, each rank sends all shards except its own in the reduce-scatter,
    and all shards except the next rank's in the all-gather.
    All other arguments are those of ZeroOptimizer. Sums of gradients equal DDP's up to rounding.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[torch.optim.Optimizer],
        comm: Comm | Callable[[Tensor], Comm],
        stage: int = 1,
        *,
        cost: Callable[[nn.Parameter, Group], float] | None = None,
        **options: Any,
    ):
        self._cost = update_flops if cost is None else cost
        self.owners: dict[nn.Parameter, int] = {}
        super().__init__(params, optimizer_cls, comm, stage, per_element=True, **options)

    def balance(self) -> list[float]:
        """Return, for each Comm, the largest share of the update's work divided by the mean share; 1 if all are equal."""
        loads: dict[Comm, list[float]] = {}
        for param, cost in self._costs(self.owners).items():
            comm = self._comm_of(param)
            loads.setdefault(comm, [0.0] * comm.size)[self.owners[param]] += cost
        return [max(load) * len(load) / sum(load) for load in loads.values()]

    def _costs(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, float]:
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        return {param: self._cost(param, group_of[param]) for param in params}

    def _make_chunks(self) -> None:
        by_comm: dict[Comm, dict[nn.Parameter, float]] = {}
        for param, cost in self._costs(self._trained_without_bucket()).items():
            by_comm.setdefault(self._comm_of(param), {})[param] = cost
        for comm, costs in by_comm.items():
            self.owners |= zip(costs, assign([*costs.values()], comm.size))
        super()._make_chunks()

    def _make_bucket(
        self, params: list[nn.Parameter], comm: Comm, flagged: Iterable[nn.Parameter]
    ) -> ShardedBucket:
        return WholeParameterBucket(
            self.owners, params, comm, flagged, self._options, self.stage == 1, self._axis
        )


class WholeParameterBucket(ShardedBucket):
    """A `ShardedBucket` whose chunks end at the ends of parameters.

    A rank's shard of a parameter is either the complete parameter, with its shape and placement, or empty.
    """

    def __init__(self, owners: dict[nn.Parameter, int], params: list[nn.Parameter], *arguments: Any):
        self._owners = owners
        super().__init__(sorted(params, key=owners.__getitem__), *arguments)

    def chunk_sizes(self, num_ranks: int) -> list[int]:
        """Return the sizes of the ranks' chunks. A chunk starts at its first parameter; padding and flags come last."""
        end, sizes = self.size, [0] * num_ranks
        for param in reversed(self.params):
            sizes[self._owners[param]] += end - self.layout[param][0]
            end = self.layout[param][0]
        return sizes

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor:
        part = super().slice_of_chunk(param, chunk)
        return part.view(param.shape) if part.numel() else part

    def placement_of_shard(self, param: nn.Parameter) -> Placement:
        mine = self._owners[param] == self.comm.rank
        return placement_of(param) if mine else super().placement_of_shard(param)


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return a rank for each cost. In descending order, each goes to the least loaded rank; ties go to the lowest rank."""
    loads, ranks = [0.0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += costs[i]
    return ranks


def update_flops(param: nn.Parameter, group: Group) -> float:
    """Return the FLOPs of Muon's update of a parameter, or of AdamW's in a group with rule="adamw"."""
    if group.get("rule") == ADAMW or param.dim() < 2:
        return ADAMW_FLOPS * param.numel()
    return newton_schulz_flops(tuple(param.shape))
