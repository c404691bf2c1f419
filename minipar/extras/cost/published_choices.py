"""Compare the planner's layouts for published jobs with the layouts that their authors chose.

    python -m minipar.extras.cost.published_choices docs/planner_choices.md

Each job is planned as `minipar plan` does, for minipar's own implementation. The authors' layout is predicted for the same
implementation, so that only the layouts differ. A layout that does not fit by our formulas may have fit in the authors'
program, which keeps other activations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minipar.cost.layout import Implementation, Job
from minipar.cost.memory import worst_rank_memory
from minipar.cost.plan_command import MARGIN
from minipar.cost.planner import NEAR, Plan, plan
from minipar.cost.timing import step_time
from minipar.extras.cost.published_runs import Run, published_runs

TABLES = ("megatron-table-1", "megatron-readme", "llama-3", "torchtitan")


def jobs() -> list[Run]:
    """Return the published runs whose authors chose the layout for the job, smallest first."""
    found = [run for run in published_runs() if run.table in TABLES]
    return sorted(found, key=lambda run: (run.job().shape.num_params, run.gpus, run.seq_len))


def job_of(run: Run) -> Job:
    """Return a run's job for minipar's own implementation, with the memory margin that `minipar plan` leaves."""
    job = run.job(Implementation())
    return replace(job, margin_bytes=MARGIN * job.machine.memory_bytes)


def row(run: Run) -> str:
    """Return a job's row of the table: the two layouts, their times and memory, and a sentence on the difference."""
    job = job_of(run)
    found = plan(job)
    theirs = step_time(job, run.layout).total
    num_bytes = sum(worst_rank_memory(job, run.layout)[1].values())
    choice = found.choice
    return (
        f"| {job.shape.num_params / 1e9:,.1f} B | {run.gpus:,} {job.machine.name} | {run.seq_len:,} | {run.batch:,} | "
        f"`{run.layout.name}` | {theirs:.3g} s, {num_bytes / 1e9:.0f} GB | `{choice.name}` | "
        f"{choice.seconds:.3g} s, {choice.num_bytes / 1e9:.0f} GB | {difference(job, run, found, theirs, num_bytes)} |"
    )


def difference(job: Job, run: Run, found: Plan, theirs: float, num_bytes: float) -> str:
    """Return a sentence on how our choice differs from the authors'."""
    ours, a, b = found.choice.seconds, run.layout, found.choice.layout
    axes = [name for name in ("tp", "pp", "cp", "dp") if getattr(a, name) != getattr(b, name)]
    words = "the same mesh" if not axes else "other " + ", ".join(axes)
    if a.recompute == "full" and b.recompute != "full":
        words += "; no full recomputation, since flash attention stores no scores"
    if num_bytes > job.room_bytes:
        words += "; theirs does not fit our program"
    gain = theirs / ours - 1
    if abs(gain) <= NEAR:
        return f"{words}; as fast, within {NEAR:.0%}"
    return f"{words}; theirs takes {gain:+.0%} by our formulas"


def page() -> str:
    """Return the text of docs/planner_choices.md."""
    lines = [
        "# What the planner would choose",
        "",
        "Jobs whose authors published their layout, and what `minipar plan` chooses for the same model, GPUs and batch. "
        "Both layouts are predicted for our own program, with flash attention and sequence parallelism, which those on "
        "A100 did not have; [planner.md](planner.md) says how far predictions are from measured runs. "
        "`python -m minipar.extras.cost.published_choices docs/planner_choices.md` writes this page.",
        "",
        "| model | GPUs | tokens | samples | theirs | | ours | | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(row, jobs())]) + "\n"


def main(argv: Sequence[str]) -> None:
    """Write the page to each file of `argv`; this takes minutes."""
    for path in argv:
        Path(path).write_text(page(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
