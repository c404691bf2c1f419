"""What `minipar timeline` does: the grid in the terminal, the picture on disk."""

from __future__ import annotations

from pathlib import Path

from minipar.pipeline import Costs, make_schedule, simulate
from minipar.pipeline.registry import LOOPED, chunks_per_rank
from visualize.pipeline import draw_timeline
from visualize.pipeline_text import grid_text


def timeline_command(
    schedule: tuple[str, ...] = ("1f1b",),
    stages: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    memory_limit: float | None = None,
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
        out: where to draw; a name without .png, .svg or .pdf gives a PNG and an SVG.
    """
    timelines = []
    for name in schedule:
        # Beside a schedule that has a choice of chunks, one that has none is drawn as it is.
        concerned = name in LOOPED or not any(other in LOOPED for other in schedule)
        v = chunks_per_rank(name, chunks if concerned else None)
        chunk_costs = Costs(*(cost / max(v, 1) for cost in costs), comm)
        made = make_schedule(name, stages, microbatches, v, chunk_costs, memory_limit)
        timelines.append(simulate(made, chunk_costs))
    for timeline in timelines:
        print(grid_text(timeline), end="\n\n")
    for file in draw_timeline(timelines, out):
        print(f"wrote {file}")
