"""The best layout on GPUs of two kinds: the batch divided over the replicas by their speed, and the time that saves.

Every replica of the model is on GPUs of one kind. T_k(m, b) is the predicted step of a cluster of kind k alone, whose
replicas have m microbatches of b samples. A step takes as long as the slowest replica, max over k of T_k; with equal parts
the faster kind waits. Parts by speed are those of `minipar train --dp-speeds`:

    numbers   replica r has m_r of the dp*m microbatches, m_r in proportion to 1 / T_k(m, b), b the same everywhere
    sizes     if ranks communicate in every microbatch (ZeRO-3, ep), or have one each: m is the same, b in proportion

With kinds at speeds 1 and s <= 1 and a fraction f of slow GPUs, the time saved is at most 1 - s / (1 - f + f s).
T_k includes the gradients' all-reduce over links of kind k; between kinds, the slower links count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import NamedTuple

from minipar.config.mesh_rules import shares_by_speed
from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.machines import Machine, find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.plan_command import Answer, Asked
from minipar.cost.timing import step_time
from minipar.extras.cost.choices import UnequalOptions
from minipar.support.errors import divisors


class Division(NamedTuple):
    """A division of a batch over the replicas of two kinds, and its consequences. Each field has one entry per kind.

    microbatches, samples  of each replica, in a step
    seconds                of a step, if its replicas did not wait for those of the other kind
    gigabytes              on the fullest GPU
    """

    microbatches: tuple[list[int], list[int]]
    samples: tuple[list[int], list[int]]
    seconds: tuple[float, float]
    gigabytes: tuple[float, float]

    @property
    def step_s(self) -> float:
        return max(self.seconds)


class Replicas(NamedTuple):
    """A layout's replicas of the model on two kinds of GPUs: counts[k] of them are on GPUs like machines[k]."""

    job: Job
    layout: Layout
    machines: tuple[Machine, Machine]
    counts: tuple[int, int]


def replicas_of(job: Job, layout: Layout, options: UnequalOptions) -> Replicas:
    """Return the replicas of a layout. Raises ValueError if one of them would be on GPUs of both kinds."""
    each = layout.world_size // layout.dp
    if options.gpus % each or not 0 < options.gpus < layout.world_size:
        raise ValueError(
            f"view.gpus={options.gpus}: a replica of {layout.name} has {each} GPUs, all of one kind; use a multiple of "
            f"{each} below {layout.world_size}"
        )
    others = options.gpus // each
    return Replicas(
        job, layout, (job.machine, other_machine(options, job.machine)), (layout.dp - others, others)
    )


def other_machine(options: UnequalOptions, like: Machine) -> Machine:
    """Return the other kind of GPU: by name, or `like` with `speed` times its rates. Links and memory stay the same."""
    if options.machine:
        return find_machine(options.machine)
    speed = options.speed
    return replace(
        like,
        name=f"{like.name} at {speed:g} of its speed",
        peak_flops=speed * like.peak_flops,
        hbm_bytes_per_s=speed * like.hbm_bytes_per_s,
    )


def equal_parts(replicas: Replicas) -> Division:
    """Divide the batch equally, into the microbatches with which the step takes the least time."""
    return _fastest(replicas, lambda m, b: [1.0] * replicas.layout.dp)


def by_speed(replicas: Replicas) -> Division:
    """Divide the batch so that the last replica finishes earliest, among divisions that fit in memory."""
    divisions = equal_parts(replicas), _fastest(replicas, partial(_speeds, replicas))
    return min(divisions, key=lambda one: one.step_s)


# The speeds of all replicas, from a number m of microbatches and their size b. Empty if these are not legal.
Speeds = Callable[[int, int], list[float]]


def _speeds(replicas: Replicas, m: int, b: int) -> list[float]:
    """Return the steps per second that each replica would make alone, with m microbatches of b samples."""
    try:
        each_s = [_replica(replicas, kind, m, b)[0] for kind in (0, 1)]
    except ValueError:
        return []
    return [1 / seconds for seconds, count in zip(each_s, replicas.counts) for _ in range(count)]


def _fastest(replicas: Replicas, speeds: Speeds) -> Division:
    """Return the division with the shortest step that fits in memory; if none fits, the layout's own microbatches."""
    job, layout, machines, _ = replicas
    m = layout.microbatches(job)
    if layout.zero == 3 or layout.ep > 1:  # ranks communicate in every microbatch
        found = _by_size(replicas, divisors(job.batch // layout.dp), speeds)
    else:
        found = _by_size(replicas, [1], speeds) if m == 1 else _by_number(replicas, speeds)
    free = 1 - job.margin_bytes / job.machine.memory_bytes
    fits = [
        one
        for one in found
        if all(1e9 * gb <= free * machine.memory_bytes for gb, machine in zip(one.gigabytes, machines))
    ]
    if fits:
        return min(fits, key=lambda one: one.step_s)
    return _division(replicas, [(m, layout.microbatch)] * layout.dp)


def _by_number(replicas: Replicas, speeds: Speeds) -> list[Division]:
    """Return divisions in which replicas have different numbers of microbatches, of every size up to the layout's."""
    job, layout, _, _ = replicas
    found = []
    for b in divisors(layout.microbatch):
        m = job.batch // (layout.dp * b)
        each = speeds(m, b)
        for unit in divisors(m) if each else ():  # some schedules need a multiple of pp microbatches
            numbers = [unit * n for n in shares_by_speed(layout.dp * m // unit, each)]
            try:
                found.append(_division(replicas, [(number, b) for number in numbers]))
            except ValueError:
                continue
            break
    return found


def _by_size(replicas: Replicas, numbers: Sequence[int], speeds: Speeds) -> list[Division]:
    """Return divisions in which all replicas have the same number of microbatches, of different sizes."""
    job, layout, _, _ = replicas
    found = []
    for m in numbers:
        try:
            if each := speeds(m, job.batch // m // layout.dp):
                sizes = shares_by_speed(job.batch // m, each)
                found.append(_division(replicas, [(m, size) for size in sizes]))
        except ValueError:
            continue
    return found


def _division(replicas: Replicas, parts: Sequence[tuple[int, int]]) -> Division:
    """Return the division with these parts: (microbatches, samples per microbatch) of each replica."""
    count = replicas.counts[0]
    first, second = parts[:count], parts[count:]
    seconds, gigabytes = [], []
    for kind, own in enumerate((first, second)):
        predicted = [_replica(replicas, kind, *part) for part in set(own)]
        seconds.append(max(step_s for step_s, _ in predicted))
        gigabytes.append(max(gb for _, gb in predicted))
    return Division(
        ([m for m, _ in first], [m for m, _ in second]),
        ([m * b for m, b in first], [m * b for m, b in second]),
        (seconds[0], seconds[1]),
        (gigabytes[0], gigabytes[1]),
    )


def _replica(replicas: Replicas, kind: int, m: int, b: int) -> tuple[float, float]:
    """Return the time of a step, and the GB on the fullest GPU, of a replica with m microbatches of b samples."""
    own = replace(replicas.layout, microbatch=b)
    job = replace(replicas.job, machine=replicas.machines[kind], batch=m * b * own.dp, margin_bytes=0.0)
    if why := why_illegal(job, own):
        raise ValueError(f"{b} samples in {m} microbatches: {why}")
    return step_time(job, own).total, sum(worst_rank_memory(job, own)[1].values()) / 1e9


def _best_replicas(asked: Asked, options: UnequalOptions) -> Replicas:
    """Return the replicas of the layout that takes the least time by speed, among those of one kind of GPU per replica."""
    assert asked.layout is not None
    found, refusals = [], []
    for layout in (asked.layout, *asked.others):
        try:
            found.append(replicas_of(asked.job, layout, options))
        except ValueError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return min(found, key=lambda replicas: by_speed(replicas).step_s)


def unequal_view(asked: Asked, options: UnequalOptions) -> Answer:
    """Return the division of the batch over two kinds of GPUs, equal and by speed, and the flags for the latter."""
    replicas = _best_replicas(asked, options)
    job, layout, machines, counts = replicas
    equal, best = equal_parts(replicas), by_speed(replicas)
    lines = [
        "",
        f"{layout.name} on {counts[0]} replicas of {machines[0].name}, {counts[1]} of {machines[1].name}",
        f"{'':12} {'s/step':>8} {'each kind alone':>17} {'microbatches':>13} {'samples':>11} {'GB':>13}",
    ]
    for name, one in (("equal parts", equal), ("by speed", best)):
        (m, n), (b, c) = ([max(part) for part in each] for each in (one.microbatches, one.samples))
        lines.append(
            f"{name:12} {one.step_s:8.3f} {one.seconds[0]:8.3f} {one.seconds[1]:8.3f} {m:7} {n:5} {b:5} {c:5} "
            f"{one.gigabytes[0]:6.1f} {one.gigabytes[1]:6.1f}"
        )
    for machine, gigabytes in zip(machines, best.gigabytes):
        if 1e9 * gigabytes > machine.memory_bytes:
            lines.append(f"{machine.name} has {machine.memory_bytes / 1e9:g} GB: this does not fit")
    lines += [f"by speed is {equal.step_s / best.step_s:.2f} times as fast:", *_flags(job, layout, best)]
    named = {"equal": equal, "by_speed": best}
    numbers = {name: one._asdict() | {"step_s": one.step_s} for name, one in named.items()}
    return Answer(lines, {"unequal": {"layout": layout.name} | numbers})


def _flags(job: Job, layout: Layout, best: Division) -> list[str]:
    """Return the flags with which `minipar train` divides a batch like this, as lines."""
    samples = [n for part in best.samples for n in part]
    common = gcd(*samples)
    speeds = " ".join(str(n // common) for n in samples)
    mean = sum(m for part in best.microbatches for m in part) // layout.dp
    lines = [f"--dp {layout.dp} --dp-speeds {speeds} --batch-size {job.batch} --microbatches {mean}"]
    if layout.pp > 1:
        lines.append("list the hosts so that all stages of a replica are on GPUs of one kind")
    return lines
