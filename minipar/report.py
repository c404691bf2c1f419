"""Command-line output of a training run: progress bar, figures, and a summary."""

from __future__ import annotations

from minipar.trace import find_straggler

STRAGGLER_RATIO = 1.5  # report a rank that computes this many times as long as the median rank


class Progress:
    """A progress bar for training, then one for the reference run in one process. Under torchrun only rank 0 draws."""

    def __init__(self, config):
        self._totals = {"train": config.steps, "verify": min(config.verify_steps, config.steps)}
        self._bar, self._phase = None, None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, metrics: dict) -> None:
        from tqdm import tqdm

        if what != self._phase:
            self.__exit__()
            label = {"train": "train", "verify": "again on one process"}[what]
            self._bar, self._phase = tqdm(total=self._totals[what], desc=label, unit="step"), what
        if "loss" in metrics:
            self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:,.0f} tokens/s")
        self._bar.update()


def print_summary(result) -> None:
    """Draw the run's figures, and print a summary and where its files are."""
    from visualize.trace import draw_trace
    from visualize.training import draw_training

    again = None if result.reference is None else {"one process, again": result.reference.losses}
    draw_training(result.metrics, result.folder / "loss.png", reference=again)
    if any(result.traces.values()):
        draw_trace(result.traces, result.folder / "timeline.png")
    first, last = result.metrics[0], result.metrics[-1]
    print(f"\n{result.sample}\n")
    print(f"loss {first['loss']:.3f} -> {last['loss']:.3f} in {len(result.metrics)} steps")
    if (skipped := sum(line["skipped"] for line in result.metrics)) > 0:
        print(f"{skipped} steps skipped: their loss or gradient norm was not a number")
    straggler = find_straggler(result.traces)
    if straggler is not None and straggler.ratio > STRAGGLER_RATIO:
        print(
            f"rank {straggler.rank} computed {straggler.ratio:.1f} times as long as the median rank: the others waited"
        )
    if result.difference is not None:
        print(result.difference)
    print(
        f"look in {result.folder}/: loss.png, timeline.png, trace.json (open it in ui.perfetto.dev), "
        "metrics.jsonl, sample.txt"
    )


def draw_exercise(exercise, path) -> str | None:
    """Draw a run of a learner's file: a schedule as text, messages as a picture beside the file; say where it is."""
    from minipar.exercises.check import printing_little
    from minipar.exercises.recording import record_schedule, record_spans
    from minipar.runtime.launch import shutdown
    from minipar.schedules import Costs, simulate
    from visualize.pipeline_text import grid_text
    from visualize.trace import draw_trace

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


def draw_losses(losses: dict[str, list[float]], path) -> str:
    """Draw a faulty training's losses beside those of the right one; return the path."""
    from visualize.training import draw_training

    (name, right), (_, wrong) = losses.items()
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(draw_training([{"step": i, "loss": x} for i, x in enumerate(wrong)], path, {name: right}))
