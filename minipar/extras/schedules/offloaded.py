"""A limit on the activations that a pipeline rank holds: units beyond it wait in CPU memory until their backward."""

from __future__ import annotations

from dataclasses import dataclass

from minipar.schedules.registry import make_schedule
from minipar.schedules.schedule import Action, Schedule

WHOLE = ("1f1b", "gpipe", "breadth-first", "interleaved")  # schedules whose backwards are whole


@dataclass(frozen=True)
class OffloadedSchedule(Schedule):
    """A schedule that moves activations of some (stage, microbatch) pairs to CPU memory between forward and backward."""

    offloaded: frozenset[tuple[int, int]] = frozenset()

    def live_change(self, action: Action) -> tuple[int, int]:
        """Return the changes of a unit that is live, if it is offloaded, during its forward and its backward alone."""
        if action[1:] in self.offloaded:
            return int(action.op in "FB"), -int(action.op in "FB")
        return super().live_change(action)


def offloaded(p: int, m: int, of: str = "1f1b", limit: int = 2) -> OffloadedSchedule:
    """Return the schedule `of`, with so many units offloaded that no rank has more than `limit` live at once.

    A unit is a microbatch on one stage. An offloaded one is live during its forward and its backward alone:

        peak_live of a rank = min(limit, its peak_live in `of`)

    Order and messages are those of `of`. An offloaded unit's activations cross the link to the CPU once each way.
    When room is needed, the unit whose backward is last is offloaded, as a cache evicts what is needed last.
    Raises ValueError for a limit below 1, or a schedule whose backwards come in halves.
    Source: SPPO, arXiv:2503.10377; OptPipe, arXiv:2510.05186, which search for the units, with the time of transfers.
    """
    if limit < 1:
        raise ValueError(f"limit={limit}; use 1 or more: a unit is live during its forward and its backward")
    if of not in WHOLE:
        raise ValueError(f"of={of!r} has no whole backwards to offload before; use {', '.join(WHOLE)}")
    schedule = make_schedule(of, p, m)
    away = frozenset(unit for actions in schedule.actions for unit in _beyond(actions, limit))
    whole = schedule.actions, schedule.stage_rank, schedule.num_microbatches
    return OffloadedSchedule(*whole, f"{of}, at most {limit} live", away)


def _beyond(actions: tuple[Action, ...], limit: int) -> set[tuple[int, int]]:
    """Return the (stage, unit) pairs that a rank must offload."""
    ends = {action[1:]: i for i, action in enumerate(actions) if action.op == "B"}
    kept: set[tuple[int, int]] = set()
    away: set[tuple[int, int]] = set()
    for op, *unit in actions:
        running = (unit[0], unit[1])
        while len(kept - {running}) >= limit:
            last = max(kept - {running}, key=lambda other: ends[other])
            kept.remove(last)
            away.add(last)
        if op == "F":
            kept.add(running)
        else:
            kept.discard(running)
    return away
