"""Command-line output of a training run: progress bar, figures, and a summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from minipar.config.train_config import TrainConfig
from minipar.support.trace import Span, find_data_wait, find_straggler

if TYPE_CHECKING:
    from minipar.learn.exercises.registry import Exercise
    from minipar.train.trainer import Result

STRAGGLER_RATIO = 1.5  # report a rank that computes this many times as long as the median rank
INPUT_BOUND_FRACTION = 0.1  # report a rank that waits for data for more than this fraction of the traced time


class Progress:
    """A progress bar for training, then one for the reference run in one process. Under torchrun only rank 0 draws.

    Nothing is drawn where stderr is no terminal.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._totals = {"train": config.steps, "verify": min(config.verify_steps, config.steps)}
        self._bar: Any = None  # a tqdm bar
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, metrics: dict[str, float]) -> None:
        from tqdm import tqdm

        if what != self._phase:
            self.__exit__()
            label = {"train": "train", "verify": "again on one process"}[what]
            self._bar, self._phase = (
                tqdm(total=self._totals[what], desc=label, unit="step", disable=None),
                what,
            )
        if "loss" in metrics:
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:,.0f} tokens/s")
        self._bar.update()


def print_summary(result: Result) -> None:
    """Draw the run's figures, and print a summary and where its files are."""
    from minipar.visualize.trace import draw_trace
    from minipar.visualize.training import draw_training

    again = None if result.reference is None else {"one process, again": result.reference.losses}
    draw_training(result.metrics, result.folder / "loss.png", reference=again)
    if any(result.traces.values()):
        draw_trace(result.traces, result.folder / "timeline.png")
    first, last = result.metrics[0], result.metrics[-1]
    print(f"\nwhat the model writes now:\n{result.sample}\n")
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f} in {len(result.metrics)} steps")
    if (skipped := sum(line["skipped"] for line in result.metrics)) > 0:
        print(f"{skipped} steps skipped: their loss or gradient norm was not a number")
    for finding in describe_trace(result.traces):
        print(finding)
    if result.difference is not None:
        print(result.difference)
    print(
        f"look in {result.folder}/: loss.png, timeline.png, trace.json (open it in ui.perfetto.dev), "
        "metrics.jsonl, sample.txt"
    )


def describe_trace(spans_by_rank: dict[int, list[Span]]) -> list[str]:
    """Return a sentence for each problem that a trace shows: a rank that waits for its data, or computes unusually long."""
    found = []
    waited = find_data_wait(spans_by_rank)
    if waited is not None and waited.fraction > INPUT_BOUND_FRACTION:
        found.append(
            f"the run is input bound: rank {waited.rank} waited {waited.fraction:.0%} of the traced time for its batches"
        )
    straggler = find_straggler(spans_by_rank)
    if straggler is not None and straggler.ratio > STRAGGLER_RATIO:
        found.append(
            f"rank {straggler.rank} computed {straggler.ratio:.1f} times as long as the median rank: the others waited"
        )
    return found


def draw_exercise(exercise: Exercise, path: Path) -> str | None:
    """Draw a run of a learner's file: a schedule as text, or messages as a picture beside the file; return text or path."""
    from minipar.learn.exercises.check import printing_little
    from minipar.learn.exercises.recording import record_schedule, record_spans
    from minipar.runtime.launch import shutdown
    from minipar.schedules import Costs, simulate
    from minipar.visualize.pipeline_text import grid_text
    from minipar.visualize.trace import draw_trace

    try:
        with printing_little():
            schedule = record_schedule(exercise, path)
            spans = {} if schedule else record_spans(exercise, path)
    finally:
        shutdown()
    if schedule is not None:
        return grid_text(simulate(schedule, Costs()))
    if not spans:
        return None
    title = f"{exercise.title}: {len(spans)} ranks, your messages"
    return f"your run: {draw_trace(spans, path.with_suffix('.png'), title)}"


def draw_losses(losses: dict[str, list[float]], path: Path) -> str:
    """Draw the losses of a faulty training beside those of a correct one; return the path."""
    from minipar.visualize.training import draw_training

    (name, right), (_, wrong) = losses.items()
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(draw_training([{"step": i, "loss": x} for i, x in enumerate(wrong)], path, {name: right}))
