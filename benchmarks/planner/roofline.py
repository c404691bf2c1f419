"""A roofline to hold the cost model against: FLOPs over a fraction of the peak, bytes over links, a bubble; six numbers.

    step = FLOPs / (fraction of the peak) * (1 + w_0/width) * (1 + (p-1)/(m v)) + exposed share * bytes / link

The numbers are fitted to the same half of the runs as the cost model's, by coordinate descent; a known program has a factor
on the step besides, fitted to its runs of that half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from statistics import fmean

from benchmarks.planner.published_runs import TABLES, Run, published_runs
from minipar.cost.links import LINK_FRACTION, axis_links
from minipar.cost.models import hardware_flops_per_token
from minipar.cost.traffic import step_traffic

# The fraction of the peak of dense runs and of mixtures; the width at which products reach half of it; what an operation of
# attention costs, in those of a product; exposed shares of gradients and of ZeRO-3's messages. All others are exposed.
START = {"dense": 0.6, "mixture": 0.4, "width": 500.0, "attention": 1.0, "gradients": 0.5, "zero3": 0.7}
FACTORS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
ROUNDS = 8


@cache
def parts(run: Run) -> tuple[str, float, float, dict[str, float]]:
    """Return which fraction of the peak counts, seconds of products and attention at the peak, and of messages by share."""
    job, a = run.job(), run.layout
    kind = "mixture" if job.shape.num_experts else "dense"
    flops = hardware_flops_per_token(job.shape, run.seq_len, a.recompute)
    attention = flops - hardware_flops_per_token(job.shape, 0, a.recompute)
    at_peak = run.batch * run.seq_len / run.gpus / job.machine.peak_flops
    bubble = 1 + (a.pp - 1) / (a.microbatches(job) * a.chunks)
    seconds = dict.fromkeys(("gradients", "zero3", "others"), 0.0)
    for axis, sent in step_traffic(job, a, 0).items():
        if sent.total:
            links = axis_links(job.machine, a, axis, job.implementation.fold_experts)
            link = links.inside if links.nodes == 1 else min(links.inside, links.between)
            share = ("zero3" if a.zero == 3 else "gradients") if axis in ("dp", "edp") else "others"
            seconds[share] += sent.total / (LINK_FRACTION * link)
    at_peak *= bubble
    return kind, at_peak * (flops - attention), at_peak * attention, seconds


def seconds(run: Run, numbers: Mapping[str, float]) -> float:
    kind, products, attention, messages = parts(run)
    products *= 1 + numbers["width"] / run.job().shape.dim
    exposed = sum(numbers.get(name, 1.0) * s for name, s in messages.items())
    return (products + numbers["attention"] * attention) / numbers[kind] + exposed


def error(run: Run, numbers: Mapping[str, float]) -> float:
    """Return ln(predicted time / measured time)."""
    return math.log(seconds(run, numbers) * run.per_second)


@cache
def fitted() -> dict[str, float]:
    """Return the numbers with the least mean error, without sign, on the fitted half."""
    runs = [run for run in published_runs() if not run.held_out]
    numbers = dict(START)
    for _ in range(ROUNDS):
        for name in numbers:
            tries = [numbers | {name: numbers[name] * factor} for factor in (1.0, *FACTORS)]
            numbers = min(tries, key=lambda found: fmean(abs(error(run, found)) for run in runs))
    return numbers


def unknown_error(run: Run) -> float:
    return error(run, fitted())


def known_error(run: Run) -> float:
    """Return the error with the factor of the run's program; without one if no run of it was fitted."""
    program = TABLES[run.table].program
    own = [r for r in published_runs() if not r.held_out and TABLES[r.table].program == program]
    return unknown_error(run) - (fmean(unknown_error(r) for r in own) if own else 0.0)
