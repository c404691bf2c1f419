"""Weak and strong scaling of a layout: only the number of data-parallel ranks grows; tp, pp, cp and ep stay the same.

At some point data parallelism becomes communication bound. On n data-parallel ranks, a rank with P parameters sends
2 (n-1)/n * 2 P bytes of 16-bit gradients, at W bytes per second. They may overlap with its backward of T tokens, which
takes 4 P T FLOPs, at C per second. The gradients take longer than the whole backward if

    4 P (n-1)/n / W > 4 P T / C    that is    T < (n-1)/n C/W    tokens per data-parallel rank and step, for every P

T is batch * seq / n, the tokens of one GPU if tp = pp = 1. A100s at 217 TFLOP/s, with a ring that gets 20 GB/s out of a
node, need about 10,800 tokens each; with fewer, strong scaling ends. This is a lower bound, because in minipar only the
last microbatch's backward overlaps with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.links import axis_links
from minipar.cost.plan_command import Answer, Asked, Curves, ScalingPoint
from minipar.cost.timing import step_time
from minipar.cost.traffic import critical_tokens_per_gpu
from minipar.extras.cost.choices import ScalingOptions

MOST_GPUS = 16384


def scaling(job: Job, layout: Layout, gpus: Sequence[int], weak: bool) -> list[ScalingPoint]:
    """Return one point per number of GPUs, leaving out numbers that the layout cannot use.

    weak  True: the batch grows with the number of GPUs; False: it stays the same
    """
    points, first = [], None
    others = layout.world_size // layout.dp
    for number in gpus:
        grown = replace(layout, dp=number // others)
        batch = job.batch * number // job.gpus if weak else job.batch
        scaled = replace(job, gpus=number, batch=max(1, batch))
        if number % others or why_illegal(scaled, grown) is not None:
            continue
        step = step_time(scaled, grown)
        per_gpu = scaled.batch / number / step.total
        first = first or per_gpu
        points.append(ScalingPoint(number, step.total, per_gpu / first, step.communication / step.total))
    return points


def gpu_counts(layout: Layout, most: int = MOST_GPUS) -> list[int]:
    """Return the numbers of GPUs, up to `most`, that the layout needs with 1, 2, 4 ... data-parallel ranks."""
    others = layout.world_size // layout.dp
    return [others * 2**k for k in range(most.bit_length()) if others * 2**k <= most]


def needed_tokens(job: Job, layout: Layout) -> float:
    """Return the tokens per data-parallel rank and step below which gradients take longer than the whole backward."""
    machine = job.machine
    links = axis_links(machine, layout, "dp")
    rates = [links.inside] * (links.per_node > 1) + [links.between] * (links.nodes > 1)
    flops_per_s = machine.peak_flops * machine.matmul_fraction * machine.share
    return critical_tokens_per_gpu(links.size, flops_per_s, min(rates)) if rates else 0.0


def bound_gpus(job: Job, layout: Layout, gpus: Sequence[int]) -> int | None:
    """Return the first of `gpus` at which a data-parallel rank has fewer tokens than `needed_tokens`, or None."""
    others = layout.world_size // layout.dp
    for number in gpus:
        grown = replace(layout, dp=max(1, number // others))
        ranks = grown.dp * grown.cp
        if ranks > 1 and job.batch * job.seq_len / ranks < needed_tokens(job, grown):
            return number
    return None


def scaling_curves(job: Job, layout: Layout) -> tuple[dict[str, list[ScalingPoint]], tuple[int, str] | None]:
    """Return (curves, bound): the scaling curves from one data-parallel rank to MOST_GPUS, and where gradients limit them.

    bound  (number of GPUs, note): from that number on, summing a step's gradients takes longer than its backward; None if
           this happens at none of the numbers
    """
    gpus = gpu_counts(layout)
    first = replace(job, gpus=gpus[0], batch=max(1, job.batch * gpus[0] // job.gpus))
    curves = {
        "weak: the batch grows": scaling(first, layout, gpus, weak=True),
        "strong: the batch stays": scaling(job, layout, gpus, weak=False),
    }
    bound = bound_gpus(job, layout, gpus)
    if bound is None:
        return curves, None
    dp = bound * layout.dp // layout.world_size
    tokens, needed = job.batch * job.seq_len // (dp * layout.cp), needed_tokens(job, replace(layout, dp=dp))
    note = f"this batch leaves a data-parallel\nrank {tokens:,} tokens; to hide its\ngradients it needs {needed:,.0f}"
    return curves, (bound, note)


def scaling_view(asked: Asked, options: ScalingOptions) -> Answer:
    """Return the table of the layout's scaling, and its curves if the options name a picture."""
    assert asked.layout is not None
    curves, bound = scaling_curves(asked.job, asked.layout)
    lines = [
        "",
        f"scaling of {asked.layout.name}",
        f"{'GPUs':>8} {'s/step':>8} {'per GPU':>8} {'messages':>9}",
    ]
    for name, points in curves.items():
        lines.append(name)
        lines += [f"{p.gpus:8,} {p.seconds:8.3f} {p.efficiency:8.1%} {p.communication:9.1%}" for p in points]
    if bound is not None:
        lines.append(f"from {bound[0]:,} GPUs on, {' '.join(bound[1].split())}")
    entries = {name.partition(":")[0]: [p._asdict() for p in points] for name, points in curves.items()}
    drawn = [] if options.picture is None else [Curves(options.picture, curves, bound)]
    return Answer(lines, {"scaling": entries | {"bound_gpus": bound and bound[0]}}, drawn)
