"""An exact search for the shortest schedule, for small p and m: a benchmark for all other schedules.

    pip install 'minipar[optimal]'          OR-tools, whose CP-SAT solver does the search

The start of each action is a variable. A rank's actions do not overlap. An action starts after the results that it `needs`
have arrived. An activation is held from the start of its F to the end of its W, and a rank holds at most `memory_limit` at
once. A rank's own span is the time from the start of its first action to the end of its last. The solver minimises the
longest own span of all ranks, from which `Timeline` computes bubbles.
Source: OptPipe, arXiv:2510.05186, which solves the same problem with a mixed-integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

from minipar.schedules.costs import Costs
from minipar.schedules.schedule import HALVES, Action, Op, Schedule, needs
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import hop
from minipar.support.errors import require_positive

FINEST = 10_000  # costs are rounded to fractions with at most this denominator


class Optimal(NamedTuple):
    """The best schedule found, its longest time in s from a rank's first start to its last end, and a lower bound on it."""

    schedule: Schedule
    span: float
    bound: float

    @property
    def proved(self) -> bool:
        """Whether the search proved that no schedule with the same placement and memory limit is shorter."""
        return self.span <= self.bound * (1 + 1e-9)


def optimal(
    p: int, m: int, costs: Costs | None = None, memory_limit: int | None = None, *, start: Schedule | None = None,
    seconds: float = 30.0, workers: int = 1,
) -> Optimal:  # fmt: skip
    """Return the best schedule of m microbatches on p ranks, with split backwards.

    It minimises the longest time from a rank's first action to its last (`Timeline.longest_own_span`).

    memory_limit  maximum number of activations that a rank may hold; default: p, 1F1B's memory
    start         a schedule to begin from, whose placement of stages is kept; default: one stage per rank
    seconds       time limit of the search; at the limit, the best schedule and bound found so far are returned

    p = m = 4 takes a second to prove; the time grows exponentially.
    Raises ValueError if p, m or memory_limit is below 1, no schedule is found in time, or OR-tools is not installed.
    """
    costs, limit = costs or Costs(), p if memory_limit is None else memory_limit
    require_positive(p=p, m=m, memory_limit=limit)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError("the exact search needs OR-tools; pip install 'minipar[optimal]'") from None
    stage_rank = start.stage_rank if start else tuple(range(p))
    ticks, scale = _in_ticks(costs, stage_rank)
    model = cp_model.CpModel()
    starts = _starts(model, stage_rank, m, ticks)
    longest = model.new_int_var(0, ticks.horizon(m), "longest own span")
    for rank in range(p):
        _constrain_rank(
            model, [a for a in starts if stage_rank[a.stage] == rank], starts, ticks, limit, longest
        )
    if start is not None:
        for action, (begin, _) in simulate(start, costs).spans.items():
            if action in starts:
                model.add_hint(starts[action], round(begin * scale))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(
            f"no schedule of p={p}, m={m}, memory_limit={limit} was found within {seconds:g} s; give it more seconds"
        )
    ordered = sorted(starts, key=lambda action: solver.value(starts[action]))
    found = tuple(tuple(a for a in ordered if stage_rank[a.stage] == rank) for rank in range(p))
    schedule = Schedule(found, stage_rank, m, "optimal")
    return Optimal(schedule, simulate(schedule, costs).longest_own_span, solver.best_objective_bound / scale)


def _starts(model: Any, stage_rank: Sequence[int], m: int, ticks: _Ticks) -> dict[Action, Any]:
    """Add a start variable for every action, and require it to follow the results it `needs` and the previous microbatch.

    All microbatches cost the same, so at least one best schedule runs them in order.
    """
    num_stages = len(stage_rank)
    actions = [Action(op, stage, k) for stage in range(num_stages) for op in HALVES for k in range(m)]
    starts = {action: model.new_int_var(0, ticks.horizon(m), str(action)) for action in actions}
    for action in actions:
        for need in needs(action, num_stages):
            model.add(starts[action] >= starts[need] + ticks.of(need) + hop(ticks.hops, need, action))
        if action.microbatch:
            before = action._replace(microbatch=action.microbatch - 1)
            model.add(starts[action] >= starts[before] + ticks.of(before))
    return starts


def _constrain_rank(
    model: Any, own: list[Action], starts: dict[Action, Any], ticks: _Ticks, limit: int, longest: Any
) -> None:
    """Constrain a rank: one action at a time, at most `limit` live activations, and an own span of at most `longest`."""
    ends = {action: starts[action] + ticks.of(action) for action in own}
    model.add_no_overlap(
        model.new_fixed_size_interval_var(starts[a], ticks.of(a), f"interval of {a}") for a in own
    )
    changes = [(starts[a], 1) for a in own if a.op == "F"] + [(ends[a], -1) for a in own if a.op == "W"]
    model.add_reservoir_constraint(*map(list, zip(*changes)), 0, limit)
    first = model.new_int_var(0, ticks.horizon(1 + max(a.microbatch for a in own)), "first start")
    model.add_min_equality(first, [starts[a] for a in own if a.op == "F"])
    for last in (a for a in own if a.op == "W"):
        model.add(longest >= ends[last] - first)


class _Ticks(NamedTuple):
    """Costs as integers (ticks), by op and stage. `hops[s]` is the latency of a message from stage s to the next."""

    seconds: dict[Op, list[int]]
    hops: Sequence[int]

    def of(self, action: Action) -> int:
        return self.seconds[action.op][action.stage]

    def horizon(self, m: int) -> int:
        """Return an upper bound on the length of a useful schedule: all actions and all messages one after another."""
        return m * (sum(map(sum, self.seconds.values())) + 2 * sum(self.hops))


def _in_ticks(costs: Costs, stage_rank: Sequence[int]) -> tuple[_Ticks, int]:
    """Return the costs in ticks, since the solver needs integers, and the number of ticks in a second."""
    table, hops = costs.table(len(stage_rank)), costs.hops(stage_rank)
    parts = {op: [Fraction(s).limit_denominator(FINEST) for s in table[op]] for op in HALVES}
    between = [Fraction(s).limit_denominator(FINEST) for s in hops]
    scale = lcm(*(part.denominator for row in (*parts.values(), between) for part in row))
    whole = {op: [int(part * scale) for part in row] for op, row in parts.items()}
    return _Ticks(whole, [int(part * scale) for part in between]), scale
