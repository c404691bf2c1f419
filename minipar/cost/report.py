"""The text of `minipar plan`: the best layouts, why others lost, a layout itemised, and the commands to run a layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minipar.cost.doubt import COMPARED, NEAR, doubt, unusual
from minipar.cost.layout import Job, Layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import worst_rank_memory
from minipar.cost.models import ModelShape
from minipar.cost.planner import REACH, Plan, is_short
from minipar.cost.ranks import bucket_elems
from minipar.cost.reasons import Reason, why_nots
from minipar.cost.timing import step_time
from minipar.cost.traffic import step_traffic
from minipar.schedules.registry import SCHEDULES

GB = 1e9


def headline(job: Job) -> str:
    """Describe the job in one line."""
    shape, machine = job.shape, job.machine
    program = f", as {job.program} would run it" if job.program else ""
    active = f", {shape.num_active_params / 1e9:.3g} B of them active" if shape.num_experts else ""
    return (
        f"{shape.name} ({shape.num_params / 1e9:.3g} B parameters{active}) on {job.gpus} x {machine.name}, "
        f"{job.batch} samples of {job.seq_len} tokens a step, {job.precision}{program}"
    )


def plan_text(plan: Plan) -> str:
    """Return the table of the layouts found, with the uncertainty of each time, and a few lines on why others lost."""
    job, choice = plan.job, plan.choice
    margin = f", which leaves {job.margin_bytes / GB:g} GB free" if job.margin_bytes else ""
    others = f", the others take over {REACH} times as long" if plan.seen < plan.legal else ""
    lines = [
        headline(job),
        f"{plan.legal:,} legal layouts; {plan.seen:,} weighed{others}; "
        f"{len(plan.fits):,} of these fit {job.room_bytes / GB:.0f} GB{margin}",
        _near_words(plan),
        "",
        f"{'s/step':>8} {'+-':>4} {'GB':>6} {'MFU':>5} {'HFU':>5}  layout, and where time goes",
    ]
    for candidate in plan.shown():
        step = step_time(job, candidate.layout)
        lines.append(
            f"{candidate.seconds:8.3f} {doubt(job, candidate.layout):4.0%} {candidate.num_bytes / GB:6.1f} {step.mfu:5.1%} "
            f"{step.hfu:5.1%}  {candidate.name}  ({shares(step.parts)})"
        )
    lines += ["", "+-: four of five runs of another program lie within; see docs/generated/planner.md"]
    if job.machine.name in MACHINES and job.machine.name not in COMPARED and not job.shape.num_experts:
        lines.append(
            f"no dense run on {job.machine.name} was compared: it is taken to reach the fractions of A100 and H100"
        )
    if is_short(job) and choice.layout.cp == 1:
        lines.append(
            f"cp is not searched: something else fits, and few programs split samples of {job.seq_len:,} tokens"
        )
    if choice.layout.cp > 1 and is_short(job):
        lines.append(
            f"cp={choice.layout.cp} for {job.seq_len:,} tokens: few programs split samples this short, but without it "
            "nothing fits; more GPUs, or a program that keeps less (--program), would"
        )
    lines += ["", f"why not, instead of {choice.name}"]
    return "\n".join([*lines, *(f"  {r.axis}={r.value} ".ljust(20) + r.text for r in why_nots(plan))])


def _near_words(plan: Plan) -> str:
    near, fastest, leader, words = len(plan.near), plan.fits[0], plan.leader, "the fastest"
    if leader is not fastest:
        saved = 1 - fastest.seconds / leader.seconds
        words += (
            f" without {unusual(plan.job, fastest.layout)} ({fastest.name} is predicted to save {saved:.1%}, less than "
            "the doubt of such a comparison, and few programs do so)"
        )
    if near == 1:
        return f"no other layout is within {NEAR:.0%} of {words}"
    return (
        f"{near:,} layouts are within {NEAR:.0%} of {words}, nearer than this model can tell: the simplest of each "
        "mesh is shown, the simplest of all first"
    )


def shares(parts: dict[str, float]) -> str:
    """Return the parts of a step that take more than half a percent of it, largest first."""
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ordered if seconds > 0.005 * total)


def explain_text(job: Job, layout: Layout) -> str:
    """Itemise one layout: the fullest rank's memory and whether it fits, the time of a step, and the bytes sent."""
    rank, items = worst_rank_memory(job, layout)
    step, card, total = step_time(job, layout), job.room_bytes, sum(items.values())
    verdict = (
        f"fits, {(card - total) / GB:.1f} GB left"
        if total <= card
        else f"{(total - card) / GB:.1f} GB too much"
    )
    lines = [headline(job), f"{layout.name}: {layout.microbatches(job)} microbatches a rank", ""]
    lines.append(f"memory of pp rank {rank}, the fullest: {total / GB:.1f} of {card / GB:.0f} GB: {verdict}")
    lines += [f"  {name:16} {_bar(size / card)} {size / GB:8.2f} GB" for name, size in items.items() if size]
    lines += [
        "",
        f"a step: {step.total:.3f} s +- {doubt(job, layout):.0%}, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}",
    ]
    lines += [f"  {name:16} {_bar(s / step.total)} {s:8.3f} s" for name, s in step.parts.items() if s]
    lines += ["", f"sent by pp rank {rank} in a step, and of it out of the node"]
    for axis, sent in step_traffic(job, layout, rank).items():
        if sent.total:
            lines.append(f"  {axis:16} {sent.total / GB:10.2f} GB {sent.leaving / GB:10.2f} GB")
    return "\n".join(lines)


def explain_json(job: Job, layout: Layout) -> dict[str, Any]:
    """Itemise one layout as plain values, in seconds and bytes."""
    (rank, items), step = worst_rank_memory(job, layout), step_time(job, layout)
    return {
        "layout": layout.name,
        "seconds": step.total,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "parts": step.parts,
        "fullest_pp_rank": rank,
        "memory": items,
    }


def _bar(share: float, width: int = 30) -> str:
    return ("#" * min(width, round(width * share))).ljust(width)


def plan_json(plan: Plan, why: list[Reason]) -> dict[str, Any]:
    """Return the plan as plain values, in seconds and bytes; the first of "best" is the choice."""
    best = [
        explain_json(plan.job, c.layout) | {"seconds": c.seconds, "doubt": doubt(plan.job, c.layout)}
        for c in plan.shown()
    ]
    families = [
        {
            "axis": r.axis,
            "value": r.value,
            "layout": r.layout.name,
            "lost_s": r.lost_s,
            "excess_bytes": r.excess_bytes,
        }
        | {"part": r.part, "text": r.text}
        for r in why
    ]
    return {
        "job": headline(plan.job),
        "legal": plan.legal,
        "weighed": plan.seen,
        "fit": len(plan.fits),
        "near": len(plan.near),
        "best": best,
        "why": families,
    }


def run_lines(job: Job, layout: Layout) -> list[str]:
    """Return the `minipar train` and torchrun commands for a layout.

    Raises ValueError if minipar cannot train the model, or does not run on the machine.
    """
    if job.machine.name.startswith("tpu"):
        raise ValueError(f"machine={job.machine.name} runs no torchrun; leave out --run")
    flags = " ".join(_flags(job, layout))
    nodes = -(-job.gpus // job.machine.gpus_per_node)
    each = min(job.gpus, job.machine.gpus_per_node)
    meet = " --node-rank N --master-addr HOST" if nodes > 1 else ""
    return [
        f"minipar train {flags}",
        f"torchrun --nnodes {nodes} --nproc-per-node {each}{meet} -m minipar train {flags}",
    ]


def _flags(job: Job, layout: Layout) -> list[str]:
    shape = job.shape
    if not shape.gated or shape.bias or shape.positions or shape.norm_params != 1:
        raise ValueError(
            f"model={shape.name} is a GPT, and minipar trains Llama's layer alone; leave out --run"
        )
    if shape.q_latent_dim or shape.dense_layers or (shape.kv_latent_dim and shape.q_dim != shape.dim):
        raise ValueError(
            f"model={shape.name} has latent queries, first layers without experts, or latent attention with heads of their "
            "own size, which minipar does not train; leave out --run"
        )
    dtype = {"mixed": "bfloat16", "mixed-fp32-grads": "bfloat16"}.get(job.precision, job.precision)
    values = {
        axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "ep", "tp") if getattr(layout, axis) > 1
    }
    values |= {"zero": layout.zero, "microbatches": layout.microbatches(job), "recompute": layout.recompute}
    if layout.cp > 1:
        values["cp-attention"] = layout.cp_attention
    if layout.pp > 1:
        values["schedule"] = layout.schedule
    if layout.pp > 1 and SCHEDULES[layout.schedule].chunks is None:
        values["chunks"] = layout.chunks
    if layout.dp * layout.cp > 1 and layout.zero < 3:
        values["bucket-mb"] = f"{job.bytes_of.gradient * bucket_elems(job, layout) / 2**20:g}"
    values |= {"batch-size": job.batch, "seq-len": job.seq_len, "dtype": dtype}
    flags = [f"--{name} {value}" for name, value in values.items()]
    return (
        flags
        + ["--sequence-parallel"] * (layout.tp > 1)
        + [
            f"--model.{name.replace('_', '-')}"
            for name in ("parallel_block", "qkv_bias", "qk_norm")
            if getattr(shape, name)
        ]
        + [f"--model.{name} {v}" for name, v in _sizes(shape, job, layout.cp)]
    )


def _sizes(shape: ModelShape, job: Job, cp: int) -> Iterator[tuple[str, object]]:
    for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim"):
        yield name.replace("_", "-"), getattr(shape, name)
    if shape.q_dim != shape.dim:
        yield "head-dim", shape.head_dim
    if shape.kv_latent_dim:
        yield "kv-latent-dim", shape.kv_latent_dim
        yield "rope-dim", shape.rope_dim
    yield "max-seq-len", job.seq_len
    if shape.num_experts:
        for name in ("num_experts", "top_k", "capacity_factor", "moe_every", "shared_dim"):
            yield name.replace("_", "-"), getattr(shape, name)
        if cp > 1:  # zigzag gives a rank two pieces of a sample; each piece is one routing group
            yield "group-tokens", job.seq_len // (2 * cp)
