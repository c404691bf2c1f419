"""Weak and strong scaling of a layout: the same tp, pp, cp and ep, and as many data-parallel ranks as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, obstacle
from minipar.cost.timing import step_time


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
