"""Timelines, simulated or measured: when each action ran, and the bubbles, memory and critical path that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from minipar.schedules.costs import Costs
from minipar.schedules.schedule import Action, Schedule, output_key

Span = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """A schedule with the (start, end) of each action, in seconds.

    A rank's own span runs from its first start to its last end. Bubbles are computed from the longest own span, not from
    the makespan, because a rank that starts late can also start the next step late. The two differ if the ranks that start
    earlier also end earlier.
    Source: arXiv:2401.10241, section 5.2.
    """

    schedule: Schedule
    spans: Mapping[Action, Span]
    costs: Costs = field(default_factory=Costs)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start on any rank to the last end on any rank."""
        return max((e for _, e in self.spans.values()), default=0.0) - min(
            (s for s, _ in self.spans.values()), default=0.0
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time, in seconds, that each rank computes."""
        return tuple(sum(e - s for s, e in self._rank_spans(rank)) for rank in range(self.schedule.num_ranks))

    @cached_property
    def longest_own_span(self) -> float:
        """The longest time any rank spends between its first start and its last end."""
        spans = filter(None, map(self._rank_spans, range(self.schedule.num_ranks)))
        return max((rank_spans[-1][1] - rank_spans[0][0] for rank_spans in spans), default=0.0)

    @property
    def ideal(self) -> float:
        """The time that a step would take without any bubble: the work of all ranks, shared evenly."""
        return sum(self.busy) / len(self.busy)

    @property
    def bubble_over_total(self) -> float:
        """Idle time as a fraction of the time taken: (longest own span - ideal) / longest own span, below 1."""
        return 1 - self.ideal / self.longest_own_span if self.longest_own_span else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time as a multiple of useful time: (longest own span - ideal) / ideal; it may exceed 1."""
        return self.longest_own_span / self.ideal - 1 if self.ideal else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The peak number of activations that each rank holds, counting one per stage and microbatch."""
        return tuple(
            max((n for _, n in self.live(rank)), default=0) for rank in range(self.schedule.num_ranks)
        )

    def live(self, rank: int) -> list[tuple[float, int]]:
        """Return (time, number live from then on) at each change, by the schedule's `live_change`."""
        changes, count = [], 0
        for action in self.schedule.actions[rank]:
            for time, change in zip(self.spans[action], self.schedule.live_change(action)):
                if change:
                    count += change
                    changes.append((time, count))
        return changes

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends last, in order of time: each action waited for the one before it."""
        previous = {b: a for rank in self.schedule.actions for a, b in zip(rank, rank[1:])}
        by_result = {output_key(action): action for action in self.spans}
        hops = self.costs.hops(self.schedule.stage_rank)
        path = [max(self.spans, key=lambda action: self.spans[action][1])] if self.spans else []
        while path:
            action = path[-1]
            causes = [
                (
                    self.spans[by_result[output_key(need)]][1] + hop(hops, need, action),
                    by_result[output_key(need)],
                )
                for need in self.schedule.needs(action)
            ]
            if action in previous:
                causes.append((self.spans[previous[action]][1], previous[action]))
            if not causes:
                break
            path.append(max(causes)[1])
        return tuple(reversed(path))

    def _rank_spans(self, rank: int) -> list[Span]:
        return [self.spans[action] for action in self.schedule.actions[rank]]


def hop(hops: Sequence[float], need: Action, action: Action) -> float:
    """Return the latency of `need`'s result on its way to `action`: 0 within a stage."""
    return 0.0 if need.stage == action.stage else hops[min(need.stage, action.stage)]
