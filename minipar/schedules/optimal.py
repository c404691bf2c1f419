"""An exact search for the schedule with the shortest step, for small p and m: how far from it is every generator?

    pip install 'minipar[optimal]'          OR-tools, whose CP-SAT solver does the search

Each action is an interval with a start to be found. A rank's intervals do not overlap; an action starts once what it
`needs` has arrived; from an F's start to its W's end an activation is held, at most `memory_limit` at once on a rank. What
is minimised is the longest own span of a rank, by which `Timeline` measures bubbles.
Source of the comparison: OptPipe, arXiv:2510.05186, which solves the same with a mixed-integer program.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import NamedTuple

from minipar.errors import require_positive
from minipar.schedules.costs import Costs
from minipar.schedules.schedule import Action, Schedule, needs
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import hop

FINEST = 10_000  # costs are taken as fractions with at most this denominator


class Optimal(NamedTuple):
    """The best schedule found, its longest own span in seconds, and the bound below which no schedule is."""

    schedule: Schedule
    span: float
    bound: float

    @property
    def proved(self) -> bool:
        """Whether no schedule of this placement and memory can be shorter."""
        return self.span <= self.bound * (1 + 1e-9)


def optimal(
    p: int, m: int, costs: Costs | None = None, memory_limit: int | None = None, *, start: Schedule | None = None,
    seconds: float = 30.0, workers: int = 1,
) -> Optimal:  # fmt: skip
    """Return the schedule of m microbatches on p ranks, with split backwards, whose longest own span is the smallest.

    memory_limit  the most activations a rank may hold; default: p, 1F1B's memory
    start         a schedule to begin from, which must be of the same placement; its placement of stages is then used.
                  default: one stage per rank
    seconds       of search; what is best by then is returned, with the bound reached

    p = m = 4 takes a second to prove; the time grows exponentially.
    Raises ValueError where p, m or memory_limit is below 1, nothing was found in time, or OR-tools is not installed.
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


def _starts(model, stage_rank, m: int, ticks: _Ticks) -> dict:
    """A start for every action: after what it needs has arrived, and in the order of microbatches.

    Microbatches are alike, so some best schedule has them in order.
    """
    num_stages = len(stage_rank)
    actions = [Action(op, stage, k) for stage in range(num_stages) for op in "FIW" for k in range(m)]
    starts = {action: model.new_int_var(0, ticks.horizon(m), str(action)) for action in actions}
    for action in actions:
        for need in needs(action, num_stages):
            model.add(starts[action] >= starts[need] + ticks.of(need) + hop(ticks.hops, need, action))
        if action.microbatch:
            before = action._replace(microbatch=action.microbatch - 1)
            model.add(starts[action] >= starts[before] + ticks.of(before))
    return starts


def _constrain_rank(model, own: list[Action], starts: dict, ticks: _Ticks, limit: int, longest) -> None:
    """One action at a time, at most `limit` activations at once, and an own span of at most `longest`."""
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
    """Costs as whole numbers: by op and stage, and of a message after each stage."""

    seconds: dict
    hops: list[int]

    def of(self, action: Action) -> int:
        return self.seconds[action.op][action.stage]

    def horizon(self, m: int) -> int:
        """More than any schedule without needless waits takes: everything one after the other, and every message."""
        return m * (sum(map(sum, self.seconds.values())) + 2 * sum(self.hops))


def _in_ticks(costs: Costs, stage_rank) -> tuple[_Ticks, int]:
    """Return the costs as whole numbers, and how many of these a second has: the solver knows integers only."""
    table, hops = costs.table(len(stage_rank)), costs.hops(stage_rank)
    parts = {op: [Fraction(s).limit_denominator(FINEST) for s in table[op]] for op in "FIW"}
    between = [Fraction(s).limit_denominator(FINEST) for s in hops]
    scale = lcm(*(part.denominator for row in (*parts.values(), between) for part in row))
    whole = {op: [int(part * scale) for part in row] for op, row in parts.items()}
    return _Ticks(whole, [int(part * scale) for part in between]), scale
