"""Records a learner's run, to draw it: the messages of four ranks with their times, or the schedule that the code makes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from minipar.comm import Comm
from minipar.learn.exercises.registry import Exercise
from minipar.runtime.launch import run
from minipar.schedules import Schedule
from minipar.spec.all_specifications import SPECIFICATIONS
from minipar.spec.from_file import FromFile, deadline, recorded
from minipar.support.errors import RankError
from minipar.support.trace import Span

RANKS, MICROBATCHES = 4, 8


def record_schedule(exercise: Exercise, path: Path) -> Schedule | None:
    """Return the schedule of 4 ranks and 8 microbatches, or None if the exercise makes no schedules."""
    if not exercise.specification.startswith("schedule_"):
        return None
    source = FromFile(str(path.resolve()), tuple(exercise.solution))
    try:
        schedule: Schedule = run(_schedule, source, world_size=1)[0]
        return schedule
    except RankError:
        return None


def record_spans(exercise: Exercise, path: Path) -> dict[int, list[Span]]:
    """Run the specification's stage "bytes", or else "small"; return each rank's spans.

    Returns {} if no rank sends anything, or if a rank sends beside its computing: a check's models are so small that
    nearly all of that would be drawn as waiting, even in a right solution.
    """
    stages = {stage.name: stage for stage in SPECIFICATIONS[exercise.specification].stages}
    with tempfile.TemporaryDirectory() as folder:
        source = FromFile(str(path.resolve()), tuple(exercise.solution), trace_to=folder)
        stages.get("bytes", stages["small"]).test(source)
        spans = recorded(folder)
    lanes = {s.lane for own in spans.values() for s in own if s.kind == "communicate"}
    return spans if lanes == {"main"} else {}


def _schedule(world: Comm, source: FromFile) -> Schedule:
    with deadline(source.limit_s):
        schedule: Schedule = source.load()(RANKS, MICROBATCHES)
        return schedule
