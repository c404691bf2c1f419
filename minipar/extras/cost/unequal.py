"""A layout on GPUs of two kinds: the samples of each data-parallel rank by its speed, and what that gains.

Every replica of the model is on GPUs of one kind. A replica of kind k with n samples in m microbatches would take

    T_k(n)    the predicted step of a cluster of that kind alone, in which every replica has n samples

and a step takes as long as the slowest: max over k of T_k(n_k). Equal parts n = B/dp make the faster kind wait. Parts by
speed give kind k about n_k = B v_k / sum of v over replicas, with v_k = (B/dp) / T_k(B/dp): `minipar train --dp-speeds`.
Gradients are summed over both kinds, over whichever links are slower; each T has its own kind's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minipar.config.mesh_rules import shares_by_speed
from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.machines import Machine, find_machine
from minipar.cost.memory import worst_rank_memory
from minipar.cost.plan_command import Answer, Asked
from minipar.cost.stages import enough_microbatches
from minipar.cost.timing import step_time
from minipar.extras.cost.choices import UnequalOptions
from minipar.support.errors import divisors


class Division(NamedTuple):
    """How a batch is divided over the replicas of two kinds, and what follows.

    microbatches  of every replica
    samples       of each replica of the first kind, then of the second, whole samples of every microbatch
    seconds       of a step, by kind
    gigabytes     on the fullest GPU, by kind
    """

    microbatches: int
    samples: tuple[list[int], list[int]]
    seconds: tuple[float, float]
    gigabytes: tuple[float, float]

    @property
    def step_s(self) -> float:
        return max(self.seconds)


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


def replicas_of(layout: Layout, gpus: int) -> tuple[int, int]:
    """Return the numbers of replicas on the two kinds, `gpus` being of the second. Raises ValueError if one is on both."""
    each = layout.world_size // layout.dp
    if gpus % each or not 0 < gpus < layout.world_size:
        raise ValueError(
            f"view.gpus={gpus}: a replica of {layout.name} has {each} GPUs, all of one kind; use a multiple of {each} "
            f"below {layout.world_size}"
        )
    return layout.dp - gpus // each, gpus // each


def equal_parts(job: Job, layout: Layout, machines: Sequence[Machine], counts: Sequence[int]) -> Division:
    """Divide the batch equally, in the layout's own microbatches."""
    return _division(job, layout, machines, counts, layout.microbatches(job), [layout.microbatch] * layout.dp)


def by_speed(job: Job, layout: Layout, machines: Sequence[Machine], counts: Sequence[int]) -> Division:
    """Divide the batch so that the last replica is done earliest, in the best number of microbatches that fits.

    Few microbatches let parts be as unequal as the speeds are: a replica has at least one sample in each.
    """
    found = []
    for m in divisors(job.batch):
        units = job.batch // m
        even = units // layout.dp
        if not even or (layout.pp > 1 and not enough_microbatches(layout.schedule, layout.pp, m)):
            continue
        try:
            each_s = [_replica(job, layout, machine, m, even)[0] for machine in machines]
            speeds = [1 / s for s, count in zip(each_s, counts) for _ in range(count)]
            one = _division(job, layout, machines, counts, m, shares_by_speed(units, speeds))
        except ValueError:
            continue
        if all(gb <= machine.memory_bytes / 1e9 for gb, machine in zip(one.gigabytes, machines)):
            found.append(one)
    return min(found, key=lambda one: one.step_s, default=equal_parts(job, layout, machines, counts))


def _division(
    job: Job, layout: Layout, machines: Sequence[Machine], counts: Sequence[int], m: int, shares: list[int]
) -> Division:
    parts = shares[: counts[0]], shares[counts[0] :]
    (a, b), (c, d) = (_replica(job, layout, machine, m, max(part)) for machine, part in zip(machines, parts))
    first, second = ([m * share for share in part] for part in parts)
    return Division(m, (first, second), (a, c), (b, d))


def _replica(job: Job, layout: Layout, machine: Machine, m: int, microbatch: int) -> tuple[float, float]:
    """Return the seconds of a step, and GB on the fullest GPU, of a replica on this machine."""
    own = replace(layout, microbatch=microbatch)
    of_kind = replace(job, machine=machine, batch=m * microbatch * layout.dp, margin_bytes=0.0)
    if why := why_illegal(of_kind, own):
        raise ValueError(f"{microbatch} samples in {m} microbatches: {why}")
    return step_time(of_kind, own).total, sum(worst_rank_memory(of_kind, own)[1].values()) / 1e9


def unequal_view(asked: Asked, options: UnequalOptions) -> Answer:
    """Return the batch's division over two kinds of GPUs, equal and by speed, and the flags that train with the latter."""
    assert asked.layout is not None
    job, layout = asked.job, asked.layout
    machines = job.machine, other_machine(options, job.machine)
    counts = replicas_of(layout, options.gpus)
    equal, best = (way(job, layout, machines, counts) for way in (equal_parts, by_speed))
    lines = [
        "",
        f"{layout.name} on {counts[0]} replicas of {machines[0].name}, {counts[1]} of {machines[1].name}",
        f"{'':12} {'s/step':>8} {'alone':>17} {'samples':>13} {'microbatches':>13} {'GB':>13}",
    ]
    for name, one in (("equal parts", equal), ("by speed", best)):
        alone, most = one.seconds, [max(part) for part in one.samples]
        lines.append(
            f"{name:12} {one.step_s:8.3f} {alone[0]:8.3f} {alone[1]:8.3f} {most[0]:6} {most[1]:6} {one.microbatches:13} "
            f"{one.gigabytes[0]:6.1f} {one.gigabytes[1]:6.1f}"
        )
    for machine, gigabytes in zip(machines, best.gigabytes):
        if gigabytes > machine.memory_bytes / 1e9:
            lines.append(f"{machine.name} has {machine.memory_bytes / 1e9:g} GB: this does not fit")
    speeds = " ".join(str(n) for part in best.samples for n in part)
    lines.append(f"by speed is {equal.step_s / best.step_s:.2f} times as fast:")
    lines.append(f"minipar train --dp-speeds {speeds} --microbatches {best.microbatches}")
    if layout.pp > 1:
        lines.append("list the hosts so that all stages of a replica are on one kind")
    named = {"equal": equal, "by_speed": best}
    return Answer(
        lines, {"unequal": {name: one._asdict() | {"step_s": one.step_s} for name, one in named.items()}}
    )
