"""Compare the planner's layouts for published jobs with the layouts that their authors chose.

    python -m benchmarks.planner.published_choices docs/generated/planner_choices.md

Each job is planned as `minipar plan` does, for minipar's own implementation. The authors' layout is predicted for the same
implementation, so that only the layouts differ. A layout that does not fit by our formulas may have fit in the authors'
program, which keeps other activations.

DeepSeek-V3 was trained with products of 8-bit numbers and its all-to-alls behind other microbatches' work, so its time is
not compared with ours, as those of other jobs are in docs/generated/planner.md; only its layout stands here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner.published_runs import published_runs
from minipar.cost.doubt import NEAR, unusual
from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.plan_command import MARGIN
from minipar.cost.planner import Plan, plan
from minipar.cost.timing import step_time

TABLES = ("megatron-table-1", "megatron-readme", "llama-3", "torchtitan")


class Published(NamedTuple):
    """A job for minipar's own implementation, and the layout that its authors chose for it."""

    job: Job
    layout: Layout


# arXiv:2412.19437, sections 3.1, 3.2 and 4.2: nodes of 8 H800, whose NVLink has 400 GB/s in both directions, and 8 cards;
# pp 16, ep 64 over 8 nodes, ZeRO-1 and no tp. A rank of DualPipe over 16 ranks has two of 16 stages, one of each direction:
# as many as a rank of DualPipe-V over 8, which has one direction and twice the data parallelism.
DEEPSEEK_V3 = Published(
    Job(MODELS["deepseek-v3"], MACHINES["h800"], 2048, 4096, 15360),
    parse_layout("dp256-pp8-ep64-zero1-mb1-dualpipe-v"),
)


def jobs() -> list[Published]:
    """Return published jobs whose authors chose the layout, smallest first, with the margin that `minipar plan` leaves."""
    found = [
        Published(run.job(Implementation()), run.layout) for run in published_runs() if run.table in TABLES
    ]
    found = [_with_margin(theirs) for theirs in (*found, DEEPSEEK_V3)]
    return sorted(
        found, key=lambda theirs: (theirs.job.shape.num_params, theirs.job.gpus, theirs.job.seq_len)
    )


def _with_margin(theirs: Published) -> Published:
    margin = MARGIN * theirs.job.machine.memory_bytes
    return theirs._replace(job=replace(theirs.job, margin_bytes=margin))


def row(published: Published) -> str:
    """Return a job's row of the table: the two layouts, their times and memory, and a sentence on the difference."""
    job, layout = published
    found = plan(job)
    theirs = step_time(job, layout).total
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    choice = found.choice
    return (
        f"| {job.shape.num_params / 1e9:,.1f} B | {job.gpus:,} {job.machine.name} | {job.seq_len:,} | {job.batch:,} | "
        f"`{layout.name}` | {theirs:.3g} s, {num_bytes / 1e9:.0f} GB | `{choice.name}` | "
        f"{choice.seconds:.3g} s, {choice.num_bytes / 1e9:.0f} GB | {difference(job, layout, found, theirs, num_bytes)} |"
    )


def difference(job: Job, a: Layout, found: Plan, theirs: float, num_bytes: float) -> str:
    """Return a sentence on how our choice differs from the authors'."""
    ours, b = found.choice.seconds, found.choice.layout
    axes = [name for name in ("tp", "pp", "cp", "ep", "dp") if getattr(a, name) != getattr(b, name)]
    words = "the same mesh" if not axes else "other " + ", ".join(axes)
    if a.recompute == "full" and b.recompute != "full":
        words += "; no full recomputation, since flash attention stores no scores"
    if found.leader is not found.best[0]:
        words += f"; {unusual(job, found.best[0].layout)} would save less than the doubt"
    if num_bytes > job.room_bytes:
        fused = replace(job, implementation=replace(job.implementation, fused=True))
        needs = sum(worst_rank_memory(fused, a)[1].values())
        words += (
            f"; theirs does not fit our program, and with norms and SwiGLU fused needs {needs / 1e9:.0f} GB"
        )
    gain = theirs / ours - 1
    if abs(gain) <= NEAR:
        return f"{words}; as fast, within {NEAR:.0%}"
    return f"{words}; theirs takes {gain:+.0%} by our formulas"


def page() -> str:
    """Return the text of docs/generated/planner_choices.md."""
    lines = [
        "# What the planner would choose",
        "",
        "Jobs whose authors published their layout, and what `minipar plan` chooses for the same model, GPUs and batch. "
        "Both layouts are predicted for our own program, with flash attention and sequence parallelism, which those on "
        "A100 did not have. DeepSeek-V3 (671 B) was trained with 8-bit products and DualPipe over 16 ranks, which is "
        "written here as DualPipe-V over 8, with as many layers a rank; its all-to-alls ran behind other microbatches' "
        "work, and norms, SwiGLU and MLA's up-projections were recomputed, neither of which our program does. "
        "Llama 3's authors fused norms and SwiGLU, gave the first and the last stage a layer less, freed tensors early and "
        "filled the cards to the brim: so their layout fits without recomputation, and `minipar plan` leaves a sixteenth "
        "free. "
        "[planner.md](planner.md) says how far predictions are from measured runs. "
        "`python -m benchmarks.planner.published_choices docs/generated/planner_choices.md` writes this page.",
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
