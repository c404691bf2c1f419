"""A learner's run, to draw: the messages of four ranks and when they were sent, or the schedule that the code makes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from minipar.errors import RankError
from minipar.exercises.registry import Exercise
from minipar.runtime.launch import run
from minipar.schedules import Schedule
from minipar.spec.all_specifications import SPECIFICATIONS
from minipar.spec.from_file import FromFile, checked, recorded
from minipar.trace import Span

RANKS, MICROBATCHES = 4, 8


def record_schedule(exercise: Exercise, path: Path) -> Schedule | None:
    """Return the schedule of 4 ranks and 8 microbatches, or None where the exercise makes no schedules."""
    if not exercise.specification.startswith("schedule_"):
        return None
    source = FromFile(str(path.resolve()), tuple(exercise.solution))
    try:
        return run(checked, _schedule, source, world_size=1)[0]
    except RankError:
        return None


def record_spans(exercise: Exercise, path: Path) -> dict[int, list[Span]]:
    """Run the stage that has the fewest calls on the most ranks again, recorded; {} where nothing is sent."""
    stages = {stage.name: stage for stage in SPECIFICATIONS[exercise.specification].stages}
    with tempfile.TemporaryDirectory() as folder:
        source = FromFile(str(path.resolve()), tuple(exercise.solution), trace_to=folder)
        stages.get("bytes", stages["small"]).test(source)
        spans = recorded(folder)
    return spans if any(s.kind == "communicate" for own in spans.values() for s in own) else {}


def _schedule(world, make) -> Schedule:
    return make(RANKS, MICROBATCHES)
