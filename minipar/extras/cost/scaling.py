"""Weak and strong scaling of a layout: only the number of data-parallel ranks grows; tp, pp, cp and ep stay the same.

At some point data parallelism becomes communication bound. On n data-parallel ranks, a rank with P parameters sends
2 (n-1)/n * 2 P bytes of 16-bit gradients, at W bytes per second. They may overlap with its backward of T tokens, which
takes 4 P T FLOPs, at C per second. The gradients take longer than the whole backward if

    4 P (n-1)/n / W > 4 P T / C    that is    T < (n-1)/n C/W    tokens per data-parallel rank and step, for every P

T is batch * seq / n, the tokens of one GPU if tp = pp = 1. A100s at 217 TFLOP/s, with a ring that gets 20 GB/s out of a
node, need about 10,800 tokens each; with fewer, strong scaling ends (`minipar.cost.traffic.critical_tokens_per_gpu`). This
is a lower bound, because in minipar only the last microbatch's backward overlaps with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.timing import step_time


class ScalingPoint(NamedTuple):
    """One point of a scaling curve.

    efficiency     work per GPU and second, relative to the first point
    communication  fraction of the step spent waiting for messages
    """

    gpus: int
    seconds: float
    efficiency: float
    communication: float


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
