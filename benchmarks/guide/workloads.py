"""Write docs/generated/workloads.md: typical workloads, what limits each, the layout the planner advises, and its gain.

A row of workloads.toml names a model, GPUs and a batch. Everything but its sentence is computed. `holds` is a condition on
the computed figures; if it is false, the sentence is wrong.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from minipar.cost.doubt import doubt
from minipar.cost.layout import Job, Layout, parse_layout, why_illegal
from minipar.cost.links import axis_links
from minipar.cost.machines import MACHINES, Machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.model_table import MODELS
from minipar.cost.models import ModelShape
from minipar.cost.plan_command import MARGIN
from minipar.cost.planner import Candidate, Plan, plan
from minipar.cost.reasons import PART_NAMES, no_fit
from minipar.cost.timing import step_time
from minipar.learn.facts import quote
from minipar.support.errors import divisors

GB = 1e9
SHOWN = 0.03  # waits of a smaller fraction of a step are not named
AXIS_OF = {"tp": "tp", "cp": "cp", "ep": "ep", "zero3": "dp", "gradients": "dp", "pp": "pp"}
STATES = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True)
class Workload:
    """A job, and a sentence on what to do.

    machine_is, model_is  fields in which the machine and the model differ from those of the tables, with their values
    usual                 the layout that is usual in practice, for comparison; "": it is the recommended one
    holds                 an expression that is True if the sentence is right. It may use `a`, the recommended layout (None
                          if nothing fits), `shares`, the fraction of the step that each part takes, and `more`, the
                          additional time of `usual` as a fraction
    """

    title: str
    model: str
    gpus: int
    machine: str
    seq: int
    batch: int
    do: str
    holds: str
    usual: str = ""
    machine_is: dict[str, Any] = field(default_factory=dict)
    model_is: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def job(self) -> Job:
        shape: ModelShape = replace(MODELS[self.model], **self.model_is)
        machine: Machine = replace(MACHINES[self.machine], **self.machine_is)
        return Job(
            shape, machine, self.gpus, self.seq, self.batch, margin_bytes=MARGIN * machine.memory_bytes
        )

    @cached_property
    def found(self) -> Plan:
        return plan(self.job)

    @property
    def choice(self) -> Candidate | None:
        """The planner's choice, or None if nothing fits."""
        return self.found.choice if self.found.best else None

    @property
    def command(self) -> str:
        """The command that plans the job. A model or machine that is not in the tables is read from a file."""
        model = "model.toml" if self.model_is else self.model
        machine = "machine.toml" if self.machine_is else self.machine
        return f"minipar plan --model {model} --gpus {self.gpus} --machine {machine} --seq {self.seq} --batch {self.batch}"

    def is_right(self) -> bool:
        """Return whether the sentence agrees with the computed figures."""
        known: dict[str, Any] = dict(a=None, shares={}, more=0.0)
        if self.choice is not None:
            step = step_time(self.job, self.choice.layout)
            shares = {name: seconds / step.total for name, seconds in step.parts.items()}
            other = parse_layout(self.usual) if self.usual else self.choice.layout
            known = dict(
                a=self.choice.layout, shares=shares, more=step_time(self.job, other).total / step.total - 1
            )
        return bool(eval(self.holds, known))


class Priced(NamedTuple):
    """A layout, its predicted seconds per step with their relative error (doubt), and the bytes of its fullest rank."""

    layout: Layout
    seconds: float
    doubt: float
    num_bytes: float


def priced(job: Job, layout: Layout) -> Priced:
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    return Priced(layout, step_time(job, layout).total, doubt(job, layout), num_bytes)


def fsdp_job(job: Job) -> Job:
    """Return the job for a program that reduces gradients after each microbatch, as torch's FSDP does."""
    return replace(job, implementation=replace(job.implementation, reduce_every="microbatch"))


def naive(job: Job) -> Priced | None:
    """Predict "FSDP everywhere": the fastest ZeRO-3 layout that fits, of all microbatch sizes, with or without recompute.

    dp is as large as the batch and memory allow. Of the remaining factor, tp takes as much as fits in a node, and cp takes
    the rest. Returns None if nothing fits.
    """
    for dp in sorted((d for d in divisors(job.gpus) if job.batch % d == 0), reverse=True):
        rest = job.gpus // dp
        tp = max(t for t in divisors(rest) if t <= job.machine.gpus_per_node and job.shape.num_heads % t == 0)
        found = []
        for recompute in ("none", "full"):
            for microbatch in divisors(job.batch // dp):
                mesh = Layout(dp, cp=rest // tp, tp=tp, zero=3 if rest // tp * dp > 1 else 0)
                layout = replace(mesh, microbatch=microbatch, recompute=recompute)
                if why_illegal(job, layout) is None:
                    found.append(priced(fsdp_job(job), layout))
        fits = [each for each in found if each.num_bytes <= job.room_bytes]
        if fits:
            # Rounded, so that among nearly equal layouts the first wins: the one without recomputation.
            return min(fits, key=lambda each: float(f"{each.seconds:.2g}"))
    return None


def memory_limit(job: Job) -> str:
    """Say whether plain data parallelism fits in memory, and what it needs; dp is as large as the batch allows."""
    dp = max(d for d in divisors(job.gpus) if job.batch % d == 0)
    items = worst_rank_memory(replace(job, gpus=dp), Layout(dp))[1]
    states = sum(items[name] for name in STATES)
    kept, whole = items["activations"], sum(items.values())
    if whole <= job.room_bytes:
        return f"memory: none, a copy fits ({whole / GB:.0f} of {job.room_bytes / GB:.0f} GB)"
    what = [f"states {states / GB:,.0f} GB"] * (states > job.room_bytes / 4)
    what += [f"activations {kept / GB:,.0f} GB"] * (kept > job.room_bytes / 8)
    return f"memory: {', '.join(what)} a copy, for {job.room_bytes / GB:.0f}"


def time_limit(job: Job, layout: Layout) -> str:
    """Say which fraction of a step is arithmetic, and which waits take more than the fraction SHOWN."""
    step = step_time(job, layout)
    arithmetic = sum(step.parts[name] for name in ("compute", "recompute"))
    return ", ".join([f"time: arithmetic {arithmetic / step.total:.0%}", *waits(job, layout)])


def waits(job: Job, layout: Layout) -> list[str]:
    """Describe each wait that takes more than the fraction SHOWN of a step, longest first.

    Each has its link, and "mostly latency" where that is so.
    """
    step = step_time(job, layout)
    quick = replace(job.machine, link_latency_s=0.0, network_latency_s=0.0, start_latency_s=0.0)
    without = step_time(replace(job, machine=quick), layout)
    said = []
    for name, seconds in sorted(step.parts.items(), key=lambda item: -item[1]):
        if name in ("compute", "recompute") or seconds < SHOWN * step.total:
            continue
        words = "cp's all-to-alls" if name == "cp" and layout.cp_attention == "ulysses" else PART_NAMES[name]
        said.append(f"{words} {seconds / step.total:.0%}{_link(job, layout, name)}")
        if seconds - without.parts[name] > seconds / 2:
            said[-1] += ", mostly latency"
    return said


def _link(job: Job, layout: Layout, part: str) -> str:
    if part not in AXIS_OF:
        return ""
    return " (network)" if axis_links(job.machine, layout, AXIS_OF[part]).nodes > 1 else " (in the node)"


@cache
def workloads() -> tuple[Workload, ...]:
    text = (files("benchmarks.guide") / "workloads.toml").read_text(encoding="utf-8")
    return tuple(Workload(**quote(entry)) for entry in tomllib.loads(text)["workload"])


def page() -> str:
    """Return the text of docs/generated/workloads.md. This takes minutes."""
    lines = [
        "# Workload, bottleneck, action",
        "",
        "Typical workloads, what limits each, and the layout that `minipar plan` recommends. *Naive* is FSDP "
        "everywhere: ZeRO-3 over as many ranks as the batch and memory allow, tp in the node and cp for the rest, the "
        "fastest that fits of all microbatches, with and without recomputation; after it stands what it waits for "
        "longest. After +- stands the fraction that four of five published runs stay within "
        "([planner.md](planner.md)), after a gain its range if both predictions are off by so much in opposite "
        "directions. A *copy* is what a rank of plain data parallelism would hold. The doubt of a mixture is that of "
        "held-out runs of mixtures, and wide. No run behind a slow network or on GPUs of 24 GB was among those: there the "
        "doubt is larger than it says. All of this is predicted: we ran none of these jobs.",
        "",
        "| workload | what limits it | naive | recommended | gain |",
        "|---|---|---|---|---|",
        *map(row, workloads()),
        "",
        "## What to do, and why",
        "",
    ]
    for workload in workloads():
        lines += [paragraph(workload), ""]
    lines.append("Written by `python -m benchmarks.guide docs/generated`, which takes minutes.")
    return "\n".join(lines) + "\n"


def row(workload: Workload) -> str:
    """Return a workload's row of the table."""
    job, choice = workload.job, workload.choice
    theirs = naive(job)
    cells = [f"{workload.title}: {workload.batch:,} samples of {workload.seq:,} tokens", memory_limit(job)]
    cells.append(
        ", ".join([_text(theirs), *waits(fsdp_job(job), theirs.layout)[:1]]) if theirs else "does not fit"
    )
    if choice is None:
        cells += ["nothing fits", "-"]
    else:
        ours = priced(job, choice.layout)
        cells[1] += f"; {time_limit(job, choice.layout)}"
        cells += [_text(ours), gain(ours, theirs) if theirs else "it runs"]
    return f"| {' | '.join(cells)} |"


def gain(ours: Priced, theirs: Priced) -> str:
    """Say how many times as fast our layout is, with the range that the predictions' relative errors allow."""
    ratio = theirs.seconds / ours.seconds
    if ours.layout == theirs.layout:
        return "none: it is the same"
    least, most = ratio * (1 - theirs.doubt) / (1 + ours.doubt), ratio * (1 + theirs.doubt) / (1 - ours.doubt)
    told = "" if least > 1 else ", within the doubt"
    return f"{ratio:.2f} times ({least:.2f} to {most:.2f}){told}"


def _text(found: Priced) -> str:
    return f"`{found.layout.name}`: {found.seconds:.3g} s +- {found.doubt:.0%}, {found.num_bytes / GB:.0f} GB"


def paragraph(workload: Workload) -> str:
    """Return the sentence on what to do and, if the usual layout is a different one, its time and memory."""
    said = f"**{workload.title}.** {workload.do}"
    if workload.choice is None:
        said += f" The planner: {no_fit(workload.found)}."
    if workload.usual:
        said += f" Usual: {_beside(workload, parse_layout(workload.usual))}."
    files = [
        f"`{file}` is {base} with {', '.join(f'{name} = {_value(value)}' for name, value in changed.items())}"
        for file, base, changed in (
            ("model.toml", workload.model, workload.model_is), ("machine.toml", workload.machine, workload.machine_is)
        )
        if changed
    ]  # fmt: skip
    return f"{said} `{workload.command}`" + (f" ({'; '.join(files)})" if files else "")


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _beside(workload: Workload, layout: Layout) -> str:
    """Describe a layout's predicted time and memory, compared with the recommended layout."""
    found = priced(workload.job, layout)
    more = found.seconds / workload.found.choice.seconds - 1
    words = f"`{layout.name}`, {found.seconds:.3g} s ({more:+.0%})"
    excess = found.num_bytes - workload.job.room_bytes
    return words + (f", {excess / GB:.0f} GB too much for our program" if excess > 0 else "")
