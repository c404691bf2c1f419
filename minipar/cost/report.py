"""The text of `minipar plan`: the best layouts, why others lost, one layout itemised, and the commands that run it."""

from __future__ import annotations

from minipar.cost.layout import Job, Layout
from minipar.cost.memory import worst_rank_memory
from minipar.cost.models import ModelShape
from minipar.cost.planner import Plan
from minipar.cost.reasons import Reason
from minipar.cost.timing import step_time
from minipar.cost.traffic import step_traffic
from minipar.schedules.registry import LOOPED

GB = 1e9


def headline(job: Job) -> str:
    """Return the job in a line."""
    shape, machine = job.shape, job.machine
    active = f", {shape.num_active_params / 1e9:.3g} B of them active" if shape.num_experts else ""
    return (
        f"{shape.name} ({shape.num_params / 1e9:.3g} B parameters{active}) on {job.gpus} x {machine.name}, "
        f"{job.batch} samples of {job.seq_len} tokens a step, {job.precision}"
    )


def plan_text(plan: Plan, why: list[Reason]) -> str:
    """Return the table of the best layouts and a line for each family that lost."""
    card = plan.job.machine.memory_bytes / GB
    lines = [
        headline(plan.job),
        f"{plan.legal:,} legal layouts; {plan.seen:,} weighed, the others cannot win; {len(plan.fits):,} of these fit "
        f"{card:.0f} GB",
        "",
        f"{'s/step':>8} {'GB':>6} {'MFU':>5} {'HFU':>5}  layout, and where time goes",
    ]
    for candidate in plan.best:
        step = step_time(plan.job, candidate.layout)
        lines.append(
            f"{candidate.seconds:8.3f} {candidate.num_bytes / GB:6.1f} {step.mfu:5.1%} {step.hfu:5.1%}  {candidate.name}  "
            f"({shares(step.parts)})"
        )
    lines += ["", f"why the others lost to {plan.best[0].name}"]
    return "\n".join([*lines, *(f"  {r.axis}={r.value}".ljust(26) + r.text for r in why)])


def shares(parts: dict[str, float]) -> str:
    """Return the parts of a step above half a percent, largest first."""
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ordered if seconds > 0.005 * total)


def explain_text(job: Job, layout: Layout) -> str:
    """Return one layout itemised: memory of its worst rank against the card, seconds of a step, bytes sent."""
    rank, items = worst_rank_memory(job, layout)
    step, card, total = step_time(job, layout), job.machine.memory_bytes, sum(items.values())
    verdict = (
        f"fits, {(card - total) / GB:.1f} GB left"
        if total <= card
        else f"{(total - card) / GB:.1f} GB too much"
    )
    lines = [headline(job), f"{layout.name}: {layout.microbatches(job)} microbatches a rank", ""]
    lines.append(f"memory of pp rank {rank}, the fullest: {total / GB:.1f} of {card / GB:.0f} GB: {verdict}")
    lines += [f"  {name:16} {_bar(size / card)} {size / GB:8.2f} GB" for name, size in items.items() if size]
    lines += ["", f"a step: {step.total:.3f} s, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}"]
    lines += [f"  {name:16} {_bar(s / step.total)} {s:8.3f} s" for name, s in step.parts.items() if s]
    lines += ["", f"sent by pp rank {rank} in a step, and of it out of the node"]
    for axis, sent in step_traffic(job, layout, rank).items():
        if sent.total:
            lines.append(f"  {axis:16} {sent.total / GB:10.2f} GB {sent.leaving / GB:10.2f} GB")
    return "\n".join(lines)


def _bar(share: float, width: int = 30) -> str:
    return ("#" * min(width, round(width * share))).ljust(width)


def plan_json(plan: Plan, why: list[Reason]) -> dict:
    """Return the plan as plain values: seconds and bytes."""
    best = []
    for candidate in plan.best:
        step, (rank, items) = (
            step_time(plan.job, candidate.layout),
            worst_rank_memory(plan.job, candidate.layout),
        )
        best.append(
            {
                "layout": candidate.name,
                "seconds": candidate.seconds,
                "mfu": step.mfu,
                "hfu": step.hfu,
                "parts": step.parts,
            }
            | {"fullest_pp_rank": rank, "memory": items}
        )
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
        "best": best,
        "why": families,
    }


def run_lines(job: Job, layout: Layout) -> list[str]:
    """Return the `minipar train` and the torchrun command of a layout. Raises ValueError for a model it cannot train."""
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
    dtype = {"mixed": "bfloat16", "mixed-fp32-grads": "bfloat16"}.get(job.precision, job.precision)
    values = {
        axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "ep", "tp") if getattr(layout, axis) > 1
    }
    values |= {"zero": layout.zero, "microbatches": layout.microbatches(job), "recompute": layout.recompute}
    if layout.cp > 1:
        values["cp-attention"] = layout.cp_attention
    if layout.pp > 1:
        values["schedule"] = layout.schedule
    if layout.schedule in LOOPED:
        values["chunks"] = layout.chunks
    if layout.slices > 1:
        values |= {"seq-slices": layout.slices, "model.attention": "flash"}
    values |= {"batch-size": job.batch, "seq-len": job.seq_len, "dtype": dtype}
    flags = [f"--{name} {value}" for name, value in values.items()]
    return (
        flags
        + ["--sequence-parallel"] * (layout.tp > 1)
        + ["--model.parallel-block"] * shape.parallel_block
        + [f"--model.{name} {v}" for name, v in _sizes(shape, job, layout.cp, layout.slices)]
    )


def _sizes(shape: ModelShape, job: Job, cp: int, slices: int):
    for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim"):
        yield name.replace("_", "-"), getattr(shape, name)
    yield "max-seq-len", job.seq_len
    if shape.num_experts:
        for name in ("num_experts", "top_k", "capacity_factor", "moe_every", "shared_dim"):
            yield name.replace("_", "-"), getattr(shape, name)
        if cp > 1:  # zigzag gives a rank two pieces of a sample, and no piece is routed in parts
            yield "group-tokens", job.seq_len // (2 * cp)
        elif slices > 1:
            yield "group-tokens", job.seq_len // slices
