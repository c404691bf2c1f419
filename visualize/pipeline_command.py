"""What `minipar timeline` does: the grid in the terminal, the picture on disk."""

from __future__ import annotations

from pathlib import Path

from minipar.pipeline import Costs, Timeline, make_schedule, measured, simulate
from minipar.pipeline.emulate import emulate
from minipar.runtime.launch import run
from minipar.schedules.registry import LOOPED, chunks_per_rank
from visualize.pipeline import draw_timeline
from visualize.pipeline_text import grid_text, headline

MEASURED_S = 1.0  # how long a simulated step may take when it is run


def timeline_command(
    schedule: tuple[str, ...] = ("1f1b",),
    stages: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
    measure: bool = False,
    out: Path = Path("runs/timeline"),
) -> None:
    """Print pipeline schedules as grids, and draw them on one time axis as PNG and SVG.

    Args:
        schedule: one or several of gpipe, breadth-first, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, zb-auto.
        stages: pipeline ranks; where a schedule gives a rank several chunks, each is a part of the rank's stage.
        microbatches: microbatches a step.
        chunks: chunks a rank, for breadth-first and interleaved (2 if not given).
        costs: what F, I and W of a rank's whole stage take for one microbatch; its chunks share it evenly.
        comm: latency of a message between ranks.
        memory_limit: live activations zb-auto may hold on a rank (twice the stages if not given).
        measure: run each as well, on local ranks that sleep as long as an action costs, and draw that below.
        out: where to draw; a name without .png, .svg or .pdf gives a PNG and an SVG.
    """
    timelines: list[tuple[str, Timeline]] = []
    for name in schedule:
        # Beside a schedule that has a choice of chunks, one that has none is drawn as it is.
        concerned = name in LOOPED or not any(other in LOOPED for other in schedule)
        v = chunks_per_rank(name, chunks if concerned else None)
        chunk_costs = Costs(*(cost / max(v, 1) for cost in costs), comm)
        made = make_schedule(name, stages, microbatches, v, chunk_costs, memory_limit)
        timelines.append(("", simulate(made, chunk_costs)))
        if measure:
            timelines.append(("measured   ", _run(timelines[-1][1])))
    for prefix, timeline in timelines:
        print(prefix + grid_text(timeline), end="\n\n")
    titles = [prefix + headline(timeline) for prefix, timeline in timelines]
    for file in draw_timeline([timeline for _, timeline in timelines], out, titles):
        print(f"wrote {file}")


def _run(simulated: Timeline) -> Timeline:
    """The timeline of a real run, its seconds in the units of the simulated one. Messages take what they take."""
    schedule, costs = simulated.schedule, simulated.costs
    second = simulated.makespan / MEASURED_S
    table = costs.table(schedule.num_stages)
    in_seconds = Costs(*([cost / second for cost in table[op]] for op in "FIW"))
    spans = run(emulate, schedule, in_seconds, world_size=schedule.num_ranks)
    took = measured(schedule, spans)
    in_units = {action: (start * second, end * second) for action, (start, end) in took.spans.items()}
    return Timeline(schedule, in_units, costs)
