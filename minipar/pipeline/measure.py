"""Measured timelines and costs of a run, in the same form as simulated ones, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minipar.schedules.costs import Costs
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.timeline import Span, Timeline


def measured(schedule: Schedule, spans: Sequence[Mapping[Action, Span]]) -> Timeline:
    """Return the timeline of one step from every rank's `Pipeline.spans`, with time 0 at the first start.

    The ranks must share one clock, so they must be on one machine. On CUDA the times are the host's, which runs ahead of
    the GPU.
    Raises ValueError if an action of the schedule has no span.
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
    """Return the mean time of each op on each stage, for a simulation. If a stage runs B, not I and W, B counts as I."""
    sums: dict[tuple[str, int], list[float]] = {}
    for action, (start, end) in spans.items():
        sums.setdefault((action.op, action.stage), []).append(end - start)

    def mean(*ops: str) -> list[float]:
        """Return, for each stage, the mean duration of the first of these ops that the stage runs."""
        runs = ([sums[op, s] for op in ops if (op, s) in sums] for s in range(schedule.num_stages))
        return [sum(found[0]) / len(found[0]) if found else 0.0 for found in runs]

    return Costs(F=mean("F"), I=mean("I", "B"), W=mean("W"), comm=comm)
