"""The work of `minipar timeline`: grids in the terminal, a picture on disk. Imports torch and matplotlib only if used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minipar.schedules import Costs, Timeline, simulate
from minipar.schedules.registry import ScheduleChoice, chunks_per_rank, find_schedule, make_schedule
from minipar.support.errors import require_positive
from minipar.visualize.pipeline_text import grid_text, headline

MEASURED_S = 1.0  # seconds that a simulated step should take when it is run


def timeline(
    schedules: tuple[str, ...],
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    slices: int | None = None,
    measure: bool = False,
    out: Path | None = Path("runs/timeline"),
) -> None:
    """Print schedules as grids and, unless `out` is None, draw them to it; arguments as in `minipar timeline --help`."""
    sizes = dict(stages=stages, microbatches=microbatches, chunks=chunks, slices=slices)
    require_positive(**{name: size for name, size in sizes.items() if size is not None})
    if not any(costs):
        raise ValueError("costs=0 0 0 leave nothing to draw; use at least one above 0")
    choices = [(name, find_schedule(name)) for name in schedules]
    # Pass an option only to schedules that use it. If none does, pass it to the first, which raises an error.
    has_looped = any(choice.chunks is None for _, choice in choices)
    taken = {option for _, choice in choices for option in choice.takes}
    options = {"slices": slices, "memory_limit": memory_limit}
    timelines: list[tuple[str, Timeline]] = []
    for name, choice in choices:
        v = chunks if choice.chunks is None or not has_looped else None
        own = {
            option: value
            for option, value in options.items()
            if value is not None and (option in choice.takes or option not in taken)
        }
        simulated = _simulate(name, choice, stages, microbatches, v, own, (*costs, comm))
        timelines.append(("", simulated))
        if measure:
            timelines.append(("measured   ", _run(simulated)))
    for prefix, drawn in timelines:
        print(prefix + grid_text(drawn), end="\n\n")
    if out is None:
        return
    from minipar.visualize.pipeline import draw_timeline

    titles = [prefix + headline(drawn) for prefix, drawn in timelines]
    for file in draw_timeline([drawn for _, drawn in timelines], out, titles):
        print(f"wrote {file}")


def _simulate(
    name: str,
    choice: ScheduleChoice,
    stages: int,
    microbatches: int,
    chunks: int | None,
    arguments: dict[str, Any],
    costs: tuple[float, float, float, float],
) -> Timeline:
    """Simulate a schedule, with the costs of a rank's stage divided among chunks and slices; return the timeline."""
    v = chunks_per_rank(name, chunks)
    *seconds, comm = costs
    pieces = v * arguments.get("slices", 2) if choice.sliced else v
    f, i, w = (cost / pieces for cost in seconds)
    chunk_costs = Costs(f, i, w, comm)
    if "costs" in choice.takes:
        arguments = {**arguments, "costs": chunk_costs}
    return simulate(make_schedule(name, stages, microbatches, v, **arguments), chunk_costs)


def _run(simulated: Timeline) -> Timeline:
    """Run the schedule on ranks that sleep; return its timeline in the simulation's units. Messages take real time."""
    from minipar.pipeline import measured
    from minipar.pipeline.emulate import emulate
    from minipar.runtime.launch import run

    schedule, costs = simulated.schedule, simulated.costs
    second = simulated.makespan / MEASURED_S
    table = costs.table(schedule.num_stages)
    f, i, w = ([cost / second for cost in of_op] for of_op in (table["F"], table["I"], table["W"]))
    in_seconds = Costs(f, i, w)
    spans = run(emulate, schedule, in_seconds, world_size=schedule.num_ranks)
    took = measured(schedule, spans)
    in_units = {action: (start * second, end * second) for action, (start, end) in took.spans.items()}
    return Timeline(schedule, in_units, costs)
