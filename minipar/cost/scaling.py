"""Weak and strong scaling of a layout: the same tp, pp, cp and ep, and as many data-parallel ranks as there are.

Where data parallelism becomes communication bound: a rank with P parameters in 16 bits sends 2 (n-1)/n 2 P bytes of
gradients over n data-parallel ranks, at W bytes per second; its backward of T tokens, which may hide them, has 4 P T
FLOPs, at C per second. Gradients take longer than the whole backward where

    4 P (n-1)/n / W > 4 P T / C    that is    T < (n-1)/n C/W    tokens per data-parallel rank and step, whatever P is

T is batch * seq / n: per GPU, where tp and pp are 1. A100s at 217 TFLOP/s whose ring gets 20 GB/s out of a node need about
10,800 tokens each; strong scaling of a batch ends there. A lower bound: here only the last microbatch hides gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, obstacle
from minipar.cost.links import axis_links
from minipar.cost.timing import step_time
from minipar.cost.traffic import critical_tokens_per_gpu

MOST_GPUS = 16384


class Point(NamedTuple):
    """A number of GPUs: seconds of a step, work per GPU against that of the first point, share of time for messages."""

    gpus: int
    seconds: float
    efficiency: float
    communication: float


def scaling(job: Job, layout: Layout, gpus: Sequence[int], weak: bool) -> list[Point]:
    """Return a point per number of GPUs.

    weak  the batch grows with the GPUs; otherwise it stays, and what is legal ends where no rank has a microbatch left

    Numbers of GPUs that the layout does not divide, and those that are not legal, are left out.
    """
    points, first = [], None
    others = layout.world_size // layout.dp
    for number in gpus:
        grown = replace(layout, dp=number // others)
        batch = job.batch * number // job.gpus if weak else job.batch
        scaled = replace(job, gpus=number, batch=max(1, batch))
        if number % others or obstacle(scaled, grown) is not None:
            continue
        step = step_time(scaled, grown)
        per_gpu = scaled.batch / number / step.total
        first = first or per_gpu
        points.append(Point(number, step.total, per_gpu / first, step.communication / step.total))
    return points


def gpu_counts(layout: Layout, most: int = MOST_GPUS) -> list[int]:
    """Return the numbers of GPUs of the layout with 1, 2, 4 ... data-parallel ranks."""
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
    """Return the first of these numbers of GPUs where the batch leaves a data-parallel rank too few tokens, if any."""
    others = layout.world_size // layout.dp
    for number in gpus:
        grown = replace(layout, dp=max(1, number // others))
        ranks = grown.dp * grown.cp
        if ranks > 1 and job.batch * job.seq_len / ranks < needed_tokens(job, grown):
            return number
    return None
