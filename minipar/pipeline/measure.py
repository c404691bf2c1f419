"""What a run did, in the form of what a simulation says: measured beside predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minipar.schedules.costs import Costs
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.timeline import Span, Timeline


def measured(schedule: Schedule, spans: Sequence[Mapping[Action, Span]]) -> Timeline:
    """The timeline of one step from every rank's `Pipeline.spans`, with zero at the first start.

    The ranks' clocks must be one: that of one machine. On CUDA the times are those of the host, which runs ahead.
    Raises ValueError where an action of the schedule has no span.
    """
    merged = {action: own for rank in spans for action, own in rank.items()}
    if lacking := [action for actions in schedule.actions for action in actions if action not in merged]:
        raise ValueError(
            f"{len(lacking)} actions have no span, {lacking[0]} first; give the spans of every rank"
        )
    origin = min((start for start, _ in merged.values()), default=0.0)
    shifted = {action: (start - origin, end - origin) for action, (start, end) in merged.items()}
    return Timeline(schedule, shifted, measured_costs(schedule, shifted))


def measured_costs(schedule: Schedule, spans: Mapping[Action, Span], comm: float = 0.0) -> Costs:
    """The mean seconds of each op on each stage, to simulate with; where no backward is split, all of it counts as I."""
    sums: dict[tuple[str, int], list[float]] = {}
    for action, (start, end) in spans.items():
        sums.setdefault((action.op, action.stage), []).append(end - start)

    def mean(*ops: str) -> list[float]:
        """Per stage, of the first of these ops that the stage runs."""
        runs = ([sums[op, s] for op in ops if (op, s) in sums] for s in range(schedule.num_stages))
        return [sum(found[0]) / len(found[0]) if found else 0.0 for found in runs]

    return Costs(F=mean("F"), I=mean("I", "B"), W=mean("W"), comm=comm)
