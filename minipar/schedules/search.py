"""zb_auto: search for a zero-bubble schedule, for given costs and a memory limit."""

from __future__ import annotations

from itertools import product

from minipar.schedules.costs import Costs
from minipar.schedules.schedule import HALVES, Action, Op, Schedule, needs, output_key
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import hop
from minipar.schedules.zero_bubble import zb_h1, zb_h2
from minipar.support.errors import require_positive


def zb_auto(p: int, m: int, costs: Costs, memory_limit: float, kept_for_weights: float = 1.0) -> Schedule:
    """Return the best of eight greedy schedules and, if they fit the memory limit, ZB-H1 and ZB-H2.

    memory_limit      the largest memory of a rank, in activations of one microbatch; p is 1F1B's memory and gives the
                      paper's ZB-1p, 2p gives ZB-2p
    kept_for_weights  the fraction of an activation that is kept between its I and its W. With 1, memory_limit
                      bounds `Timeline.peak_live`; a transformer layer keeps 32sbh of sb(34h + 5as)

    The best schedule has the smallest `Timeline.longest_own_span`. Takes a few microseconds per action and candidate.
    Raises ValueError if p, m or memory_limit is below 1, or kept_for_weights is outside [0, 1].
    Source: arXiv:2401.10241, section 3.1.
    """
    require_positive(p=p, m=m)
    if not memory_limit >= 1:
        raise ValueError(
            f"memory_limit={memory_limit} holds no activation; use at least 1, {p} for 1F1B's memory"
        )
    if not 0 <= kept_for_weights <= 1:
        raise ValueError(f"kept_for_weights={kept_for_weights} is no part of an activation; use 0 to 1")
    drafts = [
        _Draft(p, m, costs, memory_limit, kept_for_weights).complete(eager, patience)
        for eager, patience in product((False, True), (None, 0.0, 0.25, 1.0))
    ]
    drafts += [
        by_hand.actions
        for by_hand in (zb_h1(p, m), zb_h2(p, m))
        if peak_memory(by_hand, kept_for_weights) <= memory_limit
    ]
    schedules = [Schedule(actions, tuple(range(p)), m, "zb-auto") for actions in drafts]
    return min(schedules, key=lambda schedule: _time_taken(schedule, costs))


def peak_memory(schedule: Schedule, kept_for_weights: float = 1.0) -> float:
    """Return the peak number of activations on any rank; after I, a fraction `kept_for_weights` of one remains."""
    change = {"F": 1.0, "B": -1.0, "I": kept_for_weights - 1, "W": -kept_for_weights}
    peak = 0.0
    for actions in schedule.actions:
        held = 0.0
        for action in actions:
            held += change[action.op]
            peak = max(peak, held)
    return peak


def _time_taken(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    timeline = simulate(schedule, costs)
    return timeline.longest_own_span, timeline.makespan


class _Draft:
    """A schedule under construction, with the time at which each rank is next free. Rank r holds stage r."""

    def __init__(self, p: int, m: int, costs: Costs, memory_limit: float, kept_for_weights: float):
        self.p, self.m = p, m
        self.memory_limit, self.kept = memory_limit, kept_for_weights
        self.seconds, self.hops = costs.table(p), costs.hops(range(p))
        self.actions: list[list[Action]] = [[] for _ in range(p)]
        self.count: list[dict[Op, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(p)]
        self.free = [0.0] * p
        self.ends: dict[Action, float] = {}
        # The own span (see `Timeline`) with which each rank would end if it had no further idle time.
        self.own_span = [m * (self.seconds["F"][rank] + self.seconds["B"][rank]) for rank in range(p)]

    def complete(self, eager: bool, patience: float | None) -> tuple[tuple[Action, ...], ...]:
        """Warm up; then add rounds of one I and one F per rank, and a W in each gap and whenever memory is short.

        eager      let the last warm-up forward end after the first gradient arrives
        patience   put a W into a gap shorter than the W if the gap exceeds this fraction of it; None: if waiting would give
                   this rank the longest own span
        """
        self._warm_up(eager)
        for _ in range(self.m):
            for rank in reversed(range(self.p)):
                self._fill(rank, self._ready("I", rank), patience)
                self._append("I", rank)
            for rank in range(self.p):
                if self._make_room(rank):
                    self._fill(rank, self._ready("F", rank), patience)
                    self._append("F", rank)
        for rank in range(self.p):
            while self._has_deferred_weights(rank):
                self._append("W", rank)
        return tuple(map(tuple, self.actions))

    def _warm_up(self, eager: bool) -> None:
        """Add the forwards that fit before the first gradient arrives, at least as many as in 1F1B."""
        most = min(self.m, int(self.memory_limit))
        for rank, gradient in enumerate(self._first_gradients()):
            least = min(most, self.p - rank)
            for n in range(most):
                start = max(self.free[rank], self._ready("F", rank))
                if n >= least and start + (0 if eager else self.seconds["F"][rank]) > gradient:
                    break
                self._append("F", rank)
            most = self.m if self.count[rank]["F"] == self.m else max(1, self.count[rank]["F"] - 1)
            most = min(most, int(self.memory_limit))

    def _first_gradients(self) -> list[float]:
        """Return the time at which each rank's first gradient arrives, if nothing delays it."""
        arrivals = [sum(self.seconds["F"]) + sum(self.hops)]
        for rank in reversed(range(1, self.p)):
            arrivals.append(arrivals[-1] + self.seconds["I"][rank] + self.hops[rank - 1])
        return arrivals[::-1]

    def _ready(self, op: Op, rank: int) -> float:
        """Return the time at which the results that the rank's next `op` needs have arrived."""
        action = Action(op, rank, self.count[rank][op])
        return max(
            (self.ends[output_key(need)] + hop(self.hops, need, action) for need in needs(action, self.p)),
            default=0.0,
        )

    def _append(self, op: Op, rank: int) -> None:
        action = Action(op, rank, self.count[rank][op])
        start = max(self.free[rank], self._ready(op, rank))
        if self.actions[rank]:
            self.own_span[rank] += start - self.free[rank]
        self.free[rank] = self.ends[action] = start + self.seconds[op][rank]
        self.actions[rank].append(action)
        self.count[rank][op] += 1

    def _fill(self, rank: int, until: float, patience: float | None) -> None:
        while self._has_deferred_weights(rank) and until > self.free[rank]:
            gap, weight = until - self.free[rank], self.seconds["W"][rank]
            if patience is None:
                worthwhile = self.own_span[rank] + gap > max(self.own_span)
            else:
                worthwhile = gap > patience * weight
            if gap < weight and not worthwhile:
                return
            self._append("W", rank)

    def _make_room(self, rank: int) -> bool:
        """Run weight gradients until another forward fits in memory. Return False if no forward remains."""
        if self.count[rank]["F"] == self.m:
            return False
        while self._has_deferred_weights(rank) and self._held(rank) + 1 > self.memory_limit:
            self._append("W", rank)
        return True

    def _has_deferred_weights(self, rank: int) -> bool:
        return self.count[rank]["W"] < self.count[rank]["I"]

    def _held(self, rank: int) -> float:
        f, i, w = (self.count[rank][op] for op in HALVES)
        return (f - i) + self.kept * (i - w)
