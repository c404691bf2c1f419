"""The work of `minipar timeline`: grids in the terminal, a picture on disk. Imports torch and matplotlib only if used."""

from __future__ import annotations

from pathlib import Path

from minipar.errors import require_positive
from minipar.schedules import Costs, Timeline, make_schedule, optimal, simulate, zb_auto
from minipar.schedules.registry import LOOPED, SLICED, chunks_per_rank
from visualize.pipeline_text import grid_text, headline

MEASURED_S = 1.0  # seconds that a simulated step should take when it is run


def timeline(
    schedules: tuple[str, ...],
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    slices: int = 1,
    measure: bool = False,
    out: Path | None = Path("runs/timeline"),
) -> None:
    """Print schedules as grids and, unless `out` is None, draw them to it; arguments as in `minipar timeline --help`."""
    require_positive(
        stages=stages, microbatches=microbatches, **({} if chunks is None else {"chunks": chunks})
    )
    timelines: list[tuple[str, Timeline]] = []
    for name in schedules:
        # `chunks` is for the looped schedules; the others drawn beside them keep their own number of chunks.
        if name == "optimal":
            timelines.append(("", _optimal(stages, microbatches, Costs(*costs, comm), memory_limit)))
            continue
        concerned = name in LOOPED or not any(other in LOOPED for other in schedules)
        v = chunks_per_rank(name, chunks if concerned else None)
        # So are `slices`, for the sliced ones.
        s = slices if name in SLICED or not any(other in SLICED for other in schedules) else 1
        chunk_costs = Costs(*(cost / max(v * s, 1) for cost in costs), comm)
        made = make_schedule(name, stages, microbatches, v, chunk_costs, memory_limit, s)
        timelines.append(("", simulate(made, chunk_costs)))
        if measure:
            timelines.append(("measured   ", _run(timelines[-1][1])))
    for prefix, drawn in timelines:
        print(prefix + grid_text(drawn), end="\n\n")
    if out is None:
        return
    from visualize.pipeline import draw_timeline

    titles = [prefix + headline(drawn) for prefix, drawn in timelines]
    for file in draw_timeline([drawn for _, drawn in timelines], out, titles):
        print(f"wrote {file}")


def _optimal(stages: int, microbatches: int, costs: Costs, memory_limit: float | None) -> Timeline:
    limit = 2 * stages if memory_limit is None else int(memory_limit)
    start = zb_auto(stages, microbatches, costs, limit)
    found = optimal(stages, microbatches, costs, limit, start=start)
    if not found.proved:
        print(
            f"optimal: after 30 s the best takes {found.span:g}, and none can take less than {found.bound:g}"
        )
    return simulate(found.schedule, costs)


def _run(simulated: Timeline) -> Timeline:
    """Run the schedule on ranks that sleep; return its timeline in the simulation's units. Messages take real time."""
    from minipar.pipeline import measured
    from minipar.pipeline.emulate import emulate
    from minipar.runtime.launch import run

    schedule, costs = simulated.schedule, simulated.costs
    second = simulated.makespan / MEASURED_S
    table = costs.table(schedule.num_stages)
    in_seconds = Costs(*([cost / second for cost in table[op]] for op in "FIW"))
    spans = run(emulate, schedule, in_seconds, world_size=schedule.num_ranks)
    took = measured(schedule, spans)
    in_units = {action: (start * second, end * second) for action, (start, end) in took.spans.items()}
    return Timeline(schedule, in_units, costs)
