"""`minipar timeline`."""

# No `from __future__ import annotations`: tyro evaluates the annotations, and some name local variables, which no type
# checker can follow.

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from minipar.cli.choices import words_of
from minipar.cli.parse import Parsed, Work
from minipar.config.check_paths import require_writable


def timeline_flags(argv: Sequence[str] | None) -> Parsed:
    """Return the command's function for tyro. Of the schedules in extras, only those that `argv` names are imported."""
    from minipar.schedules.registry import DRAWN, SCHEDULES, find_schedule

    for name in words_of(argv or (), "schedule"):
        find_schedule(name)

    def timeline_command(
        schedule: tuple[Literal[(*SCHEDULES, *DRAWN)], ...] = ("1f1b",),  # type: ignore[valid-type]
        stages: int = 4,
        microbatches: int = 8,
        chunks: int | None = None,
        costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
        comm: float = 0.0,
        memory_limit: float | None = None,
        slices: int | None = None,
        measure: bool = False,
        draw: bool = True,
        out: Path = Path("runs/timeline"),
    ) -> Work:
        """Print pipeline schedules as grids, and draw them on a common time axis as PNG and SVG.

        Args:
            schedule: one or more schedules; minipar train --help schedule describes them. optimal finds the shortest one by
                exact search (small sizes; needs OR-tools).
            stages: pipeline ranks; a schedule with several chunks per rank divides each rank's stage evenly among them.
            microbatches: microbatches per step.
            chunks: chunks per rank, for breadth-first and interleaved (2 if not given).
            costs: seconds of F (forward), I (input gradient) and W (weight gradient) of a rank's stage per microbatch.
            comm: latency of a message between ranks, in seconds.
            memory_limit: live activations that zb-auto and optimal may hold per rank (twice the stages if not given).
            slices: number of slices into which each sample's tokens are divided, for seq1f1b (2 if not given);
                a microbatch's costs are divided among them.
            measure: also run each schedule, on local ranks that sleep for each action's cost, and draw the measured times.
            draw: draw the pictures; otherwise only print the grids.
            out: the picture file; a name without .png, .svg or .pdf gives a PNG and an SVG.
        """
        options = dict(chunks=chunks, costs=costs, comm=comm, memory_limit=memory_limit, slices=slices)
        return partial(_timeline, schedule, stages, microbatches, measure, out if draw else None, options)

    return Parsed(timeline_command, argv or ())


def _timeline(
    schedules: tuple[str, ...],
    stages: int,
    microbatches: int,
    measure: bool,
    out: Path | None,
    options: dict[str, Any],
) -> None:
    if out is not None:
        require_writable(out.parent)
    from minipar.visualize.pipeline_command import timeline

    timeline(schedules, stages, microbatches, measure=measure, out=out, **options)
