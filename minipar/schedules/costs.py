"""Durations of actions: a timeline follows from them and a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minipar.schedules.schedule import Op

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds for one action on one microbatch; each field is a number, or one number per stage.

    F, I, W   forward, input gradient, weight gradient; a whole backward B takes I + W
    comm      latency of a message between different ranks; comm[s] is the latency between stages s and s+1, in both
              directions. Both ranks continue computing meanwhile
    """

    F: Cost = 1.0
    I: Cost = 1.0  # noqa: E741, the letter that the papers use
    W: Cost = 1.0
    comm: Cost = 0.0

    def table(self, num_stages: int) -> dict[Op, tuple[float, ...]]:
        """Return each op's time on each stage. Raises ValueError for a negative cost or a wrong number of stages."""
        f, i, w = (_per_stage(name, getattr(self, name), num_stages) for name in "FIW")
        return {"F": f, "B": tuple(map(sum, zip(i, w))), "I": i, "W": w}

    def hops(self, stage_rank: Sequence[int]) -> list[float]:
        """Return hops[s], the latency between stages s and s+1: 0 if one rank holds both, and for the last stage."""
        comm = _per_stage("comm", self.comm, len(stage_rank))
        apart = [a != b for a, b in zip(stage_rank, stage_rank[1:])] + [False]
        return [latency if far else 0.0 for latency, far in zip(comm, apart)]


def _per_stage(name: str, cost: Cost, num_stages: int) -> tuple[float, ...]:
    costs = tuple(cost) if isinstance(cost, Sequence) else (cost,) * num_stages
    if len(costs) != num_stages:
        raise ValueError(
            f"{name} has {len(costs)} entries for {num_stages} stages; give one number or one per stage"
        )
    if not all(map(math.isfinite, costs)):
        raise ValueError(f"{name}={cost} is no number to compute with; use a finite one")
    if min(costs, default=0) < 0:
        raise ValueError(f"{name}={cost} is negative; use a cost of at least 0")
    return costs
