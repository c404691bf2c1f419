"""Automatic pipeline stages, as in Alpa: find each stage's layers, its GPUs and its own layout.

The outer search is dynamic programming over stages and submeshes; the inner search finds the fastest layout of each stage.

    seconds = sum over stages of (t_i + message_i) + (m - 1) max t_i        t_i  seconds of one microbatch on stage i

Bounds on max t_i are tried in turn. For each, F(s, k, d) is the least sum if the layers from k on form s stages on d GPUs:

    F(s, k, d) = min over l, n of t(l layers from k, n GPUs, s live microbatches) + F(s - 1, k + l, d - n)

A stage with s - 1 stages after it keeps s microbatches alive, as in 1F1B. A submesh is a power of two GPUs of one node, or
whole nodes. A stage's layout is dp x ep x tp, ZeRO 0 or 1, and recomputation; tp stays in a node. Layers are grouped into
at most MAX_UNITS groups. `minipar train` cannot run stages with different meshes; the result shows how much time they
would save compared with the planner's equal meshes.

Source: Zheng et al., arXiv:2201.12023, section 5, where the inner search is an integer program over operators.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from minipar.config.rules import TENSOR, broken
from minipar.cost.layout import Job, Layout, views_of
from minipar.cost.links import send_s
from minipar.cost.memory import held_memory
from minipar.cost.plan_command import Answer, Asked
from minipar.cost.planner import divisors_of, plan
from minipar.cost.reasons import no_fit
from minipar.cost.stages import RankContents
from minipar.cost.timing import stage_seconds
from minipar.support.errors import divisors

MAX_UNITS = 16
INFINITY = float("inf")


class Stage(NamedTuple):
    """A stage: num_layers layers from `first` on, on `gpus` GPUs, with its fastest layout that fits in memory.

    seconds, num_bytes  per microbatch, and per rank
    """

    seconds: float
    num_bytes: float
    layout: Layout
    first: int
    num_layers: int
    gpus: int


class Split(NamedTuple):
    """A split of the model over stages, and its time per step. `samples` are those of one microbatch."""

    seconds: float
    samples: int
    stages: tuple[Stage, ...]


Best = tuple[float, tuple[Stage, ...]]  # (least sum of seconds, its stages)


def auto_split(job: Job, units: int = MAX_UNITS) -> Split | None:
    """Return the fastest split, trying every microbatch size; None if none fits."""
    found = [split_of(job, samples, units) for samples in microbatch_sizes(job)]
    return min((split for split in found if split is not None), default=None)


def microbatch_sizes(job: Job) -> list[int]:
    """Return the microbatch sizes to consider: powers of two that divide the batch, up to four samples per GPU."""
    return [n for n in divisors(job.batch) if n & (n - 1) == 0 and n <= 4 * job.gpus]


def submeshes(job: Job) -> list[int]:
    """Return the sizes of a stage's mesh: powers of two inside a node, whole nodes beyond."""
    node = job.machine.gpus_per_node
    inside = [2**k for k in range(node.bit_length()) if 2**k < node]
    return [n for n in (*inside, *range(node, job.gpus + 1, node)) if n <= job.gpus]


def cuts(job: Job, units: int) -> list[int]:
    """Return the boundaries of at most `units` even groups of layers; a stage begins and ends at a boundary."""
    count = min(units, job.shape.num_layers)
    return [job.shape.num_layers * i // count for i in range(count + 1)]


def split_of(job: Job, samples: int, units: int = MAX_UNITS) -> Split | None:
    """Return the fastest split for microbatches of `samples` samples; None if none fits."""
    ends, sizes, m = cuts(job, units), submeshes(job), job.batch // samples
    last = len(ends) - 1

    @cache
    def choice(start: int, end: int, gpus: int, live: int) -> Stage | None:
        return best_stage(job, samples, ends[start], ends[end], gpus, min(live, m))

    def least_sum(bound: float) -> Best:
        @cache
        def least(stages: int, start: int, gpus: int) -> Best:
            if stages == 0:
                return (0.0, ()) if start == last and gpus == 0 else (INFINITY, ())
            best: Best = (INFINITY, ())
            for end in range(start + 1, last - stages + 2) if stages > 1 else (last,):
                for size in sizes if stages > 1 else (gpus,):
                    if size > gpus or size not in allowed:
                        continue
                    here = choice(start, end, size, stages)
                    if here is None or here.seconds > bound or here.seconds >= best[0]:
                        continue
                    rest, others = least(stages - 1, end, gpus - size)
                    total = here.seconds + message_s(job, samples, here.layout) * (stages > 1) + rest
                    if total < best[0]:
                        best = total, (here, *others)
            return best

        return min((least(s, 0, job.gpus) for s in range(1, last + 1)), key=lambda found: found[0])

    allowed, bound = set(sizes), INFINITY
    best: Split | None = None
    while True:  # find the least sum, then require a faster slowest stage, until no split is left
        total, stages = least_sum(bound)
        if total == INFINITY:
            return best
        slowest = max(stage.seconds for stage in stages)
        seconds = total + (m - 1) * slowest
        if best is None or seconds < best.seconds:
            best = Split(seconds, samples, stages)
        bound = slowest * (1 - 1e-12)


def best_stage(job: Job, samples: int, first: int, end: int, gpus: int, live: int) -> Stage | None:
    """Return the fastest layout that fits for the layers first to end - 1 on `gpus` GPUs; None if none fits.

    live  number of microbatches whose activations are held at once
    """
    shape, best = job.shape, None
    experts = sum(shape.has_experts(i) for i in range(first, end))
    held = RankContents(0, 1, end - first, experts, first == 0, end == shape.num_layers)
    for layout in stage_layouts(job, samples, gpus, live):
        num_bytes = sum(held_memory(job, layout, held).values())
        if num_bytes <= job.machine.memory_bytes:
            seconds = stage_seconds(job, layout, held)
            found = Stage(seconds, num_bytes, layout, first, end - first, gpus)
            best = found if best is None else min(best, found)
    return best


@cache
def stage_layouts(job: Job, samples: int, gpus: int, live: int) -> tuple[Layout, ...]:
    """Return the layouts of a stage on `gpus` GPUs. Their pp holds the number of live microbatches, not of stages."""
    shape, found = job.shape, []
    for tp in divisors_of(gpus, shape.num_heads):
        dp = gpus // tp
        uneven = samples % dp or job.seq_len % tp or broken(views_of(job)({"tp": tp}), TENSOR)
        if uneven or tp > job.machine.gpus_per_node:
            continue
        for ep in divisors_of(dp, shape.num_experts) if shape.num_experts else (1,):
            for zero in (0, 1) if dp > 1 else (0,):
                for recompute in ("none", "full"):
                    found.append(Layout(dp, live, 1, ep, tp, zero, "1f1b", 1, samples // dp, recompute))
    return tuple(found)


def message_s(job: Job, samples: int, layout: Layout) -> float:
    """Return the time to send a stage's output to the next stage, in seconds; each rank sends an equal part."""
    num_bytes = samples * job.seq_len * job.shape.dim * job.bytes_of.activation
    apart = Layout(job.gpus // 2 or 1, 2) if job.gpus > 1 else Layout()
    return send_s(job.machine, apart, num_bytes / (layout.dp * layout.tp))


def split_text(job: Job, split: Split, equal_s: float | None = None) -> str:
    """Format the split as a table of its stages. `equal_s`, if given, is the time of the planner's best layout."""
    m = job.batch // split.samples
    lines = [
        f"{split.seconds:.3f} s a step with {len(split.stages)} stages and {m} microbatches of {split.samples} samples",
        "",
        f"{'stage':>5} {'layers':>9} {'GPUs':>5} {'GB':>6} {'ms':>8}  layout of the stage",
    ]
    for number, stage in enumerate(split.stages):
        layers = f"{stage.first}-{stage.first + stage.num_layers - 1}"
        lines.append(
            f"{number:5} {layers:>9} {stage.gpus:5} {stage.num_bytes / 1e9:6.1f} {1e3 * stage.seconds:8.1f}  "
            f"{replace(stage.layout, pp=1).name}"
        )
    if equal_s is not None:
        lines += ["", f"the planner's best, whose stages have one mesh: {equal_s:.3f} s"]
    return "\n".join(lines)


def auto_split_view(asked: Asked, options: None) -> Answer:
    """Return the fastest split, compared with the planner's best layout. Raises ValueError if none fits."""
    job = asked.job
    split, equal = auto_split(job), plan(job, 1)
    if split is None:
        why = f"no split of {job.shape.name} over {job.gpus} x {job.machine.name} fits"
        raise ValueError(why if equal.best else f"{why}; {no_fit(equal)}")
    best = equal.best[0] if equal.best else None
    stages = [stage._asdict() | {"layout": replace(stage.layout, pp=1).name} for stage in split.stages]
    lines = [split_text(job, split, best and best.seconds)]
    return Answer(lines, split._asdict() | {"stages": stages}, [] if best is None else [best.layout])
