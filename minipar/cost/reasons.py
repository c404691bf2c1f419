"""Why each family of layouts lost, explained by its best layout. If no layout fits, the changes that would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from minipar.cost.doubt import NEAR
from minipar.cost.layout import Job, Layout
from minipar.cost.links import axis_links
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.planner import FAMILIES, Candidate, Infeasible, Plan, mesh_sizes, zero_stages
from minipar.cost.timing import step_parts
from minipar.support.errors import divisors

PART_NAMES = {
    "compute": "arithmetic of the slowest stage",
    "recompute": "recomputation",
    "tp": "tp's messages",
    "cp": "cp's ring",
    "ep": "experts' messages",
    "zero3": "gathering weights",
    "idle": "the bubble",
    "pp": "messages between stages",
    "gradients": "gradients",
    "update": "the update",
}


class Reason(NamedTuple):
    """The reason why a family lost: a family is all layouts with one value of one axis.

    lost_s        seconds behind the plan's choice, below 0 if ahead of it; None if no layout of the family fits
    excess_bytes  bytes missing for the family's layout that needs the least memory; None if a layout fits
    part          the part of the step that lost the most time or, if nothing fits, the largest item of memory
    """

    axis: str
    value: object
    layout: Layout
    lost_s: float | None
    excess_bytes: float | None
    part: str
    text: str


def reasons(plan: Plan) -> list[Reason]:
    """Return a reason for every family except those of the plan's choice, ordered by axis and then by value."""
    winner = plan.choice
    families = [key for key in plan.families if getattr(winner.layout, key[0]) != key[1]]
    families.sort(key=lambda key: (FAMILIES.index(key[0]), str(key[1]).rjust(8)))
    return [_reason(plan.job, winner, *key, plan.families[key]) for key in families]


ASKED = ("tp", "pp", "cp", "zero", "recompute", "schedule")


def why_nots(plan: Plan) -> list[Reason]:
    """Return a reason for each axis of ASKED: why the plan does not use the best other value, each by another layout."""
    found, given = list[Reason](), set[Layout]()
    every = reasons(plan)
    for axis in ASKED:
        others = [r for r in every if r.axis == axis and r.layout not in given]
        if axis == "recompute":  # what is asked is why to recompute at all
            others = [r for r in others if r.value == "none"] or others
        if others:
            found.append(min(others, key=_nearness))
            given.add(found[-1].layout)
    return found


def _nearness(reason: Reason) -> tuple[bool, float]:
    return (True, reason.excess_bytes or 0.0) if reason.lost_s is None else (False, reason.lost_s)


def _reason(job: Job, winner: Candidate, axis: str, value: object, found: Candidate | Infeasible) -> Reason:
    if isinstance(found, Infeasible):
        return _too_large(job, axis, value, found.layout)
    lost = found.seconds - winner.seconds
    mine, theirs = step_parts(job, winner.layout), step_parts(job, found.layout)
    part = max(theirs, key=lambda name: theirs[name] - mine[name])
    more = theirs[part] - mine[part]
    text = f"+{lost:.3g} s with {found.name}, most of it {PART_NAMES[part]}: +{more:.3g} s"
    if lost < 0:
        than = "the model can tell" if -lost <= NEAR * winner.seconds else "the doubt of such a comparison"
        text = f"{found.name} is predicted {-lost / winner.seconds:.1%} faster, less than {than}; the more usual is taken"
    elif lost <= NEAR * winner.seconds:
        text = f"{found.name} is predicted {lost / winner.seconds:.1%} slower, less than the model can tell"
    if axis == "tp" and axis_links(job.machine, found.layout, "tp").nodes > 1:
        text = "leaves the node: " + text
    return Reason(axis, value, found.layout, lost, None, part, text)


def _too_large(job: Job, axis: str, value: object, layout: Layout) -> Reason:
    rank, items = worst_rank_memory(job, layout)
    excess = sum(items.values()) - job.room_bytes
    part = max(items, key=lambda name: items[name])
    where = f"on pp rank {rank}" if layout.pp > 1 else "on every rank"
    text = (
        f"{excess / 1e9:.1f} GB too much {where} even with {layout.name}: {part} {items[part] / 1e9:.1f} GB"
    )
    if (axis, value) == ("zero", 2):
        text += "; over several microbatches it keeps whole gradients, as zero=1"
    if part == "activations" and not job.implementation.fused and job.shape.gated and not layout.unit:
        fused = replace(job, implementation=replace(job.implementation, fused=True))
        needs = worst_rank_memory(fused, layout)[1][part]
        text += f", or {needs / 1e9:.1f} GB where norms and SwiGLU are fused, as --program llama-3 has them"
    return Reason(axis, value, layout, None, excess, part, text)


# Where nothing fits -------------------------------------------------------------------------------------------


def no_fit(plan: Plan) -> str:
    """Say in one line, for a job that no layout fits, how much memory is missing, what uses most, and what would help."""
    job, nearest = plan.job, plan.nearest
    if nearest is None:
        return (
            f"no layout of {job.shape.name} over gpus={job.gpus} with batch={job.batch} is legal: dp must divide the "
            "batch, tp the heads; use another number of GPUs or samples"
        )
    why = _too_large(job, "", "", nearest.layout).text
    helps = [f"gpus={n}" for n in islice(_more_gpus(job), 1)]
    helps += [f"machine={name}" for name in islice(_larger_machines(job), 1)]
    advice = (
        f"it would fit with {' or '.join(helps)}" if helps else "neither more GPUs nor larger ones would help"
    )
    return f"{job.shape.name} does not fit {job.gpus} x {job.machine.name}: {why}; {advice}"


def _more_gpus(job: Job) -> Iterator[int]:
    return (
        n for n in (job.gpus * 2**k for k in range(1, 9)) if small_layout(replace(job, gpus=n)) is not None
    )


def _larger_machines(job: Job) -> Iterator[str]:
    gpus = (machine for machine in MACHINES.values() if not machine.name.startswith("tpu"))
    larger = [machine for machine in gpus if machine.memory_bytes > job.machine.memory_bytes]
    larger.sort(key=lambda machine: machine.memory_bytes)
    return (machine.name for machine in larger if small_layout(replace(job, machine=machine)) is not None)


def small_layout(job: Job) -> Layout | None:
    """Return a layout that fits, trying those that need little memory; None if none of those fits."""
    for tp, pp, cp, ep, dp in mesh_sizes(job):
        for zero in zero_stages(dp * cp):
            for microbatch in {1, max(divisors(job.batch // dp)) if zero >= 2 else 1}:
                layout = Layout(dp, pp, cp, ep, tp, zero, microbatch=microbatch, recompute="full")
                if sum(worst_rank_memory(job, layout)[1].values()) <= job.room_bytes:
                    return layout
    return None
