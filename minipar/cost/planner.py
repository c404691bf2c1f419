"""Every legal layout of a job, those that fit ranked by predicted time, and the best of each family that lost.

A family is all layouts with one value of one axis: tp=16, or zero=0. Legal is what `obstacle` has nothing against. Two
prunings, neither of which can lose a layout that fits: where an even share of the states is more than the card, none with
these sizes fits; and a larger microbatch needs more than a smaller one, except where one microbatch is all there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, obstacle
from minipar.cost.memory import CONTEXT_BYTES, state_floor, worst_rank_memory
from minipar.cost.stages import PLANNED, chunk_choices, enough_microbatches
from minipar.cost.timing import step_parts
from minipar.errors import divisors

FAMILIES = ("tp", "pp", "cp", "ep", "zero", "schedule", "recompute", "microbatch")


class Candidate(NamedTuple):
    """A layout that fits. They compare by seconds to four digits, then by bytes of the fullest rank, then by sizes."""

    order: float
    num_bytes: float
    layout: Layout
    seconds: float

    @property
    def name(self) -> str:
        return self.layout.name


class Misfit(NamedTuple):
    """A layout that does not fit, and by how many bytes."""

    excess: float
    layout: Layout


@dataclass
class Plan:
    """The result of a search.

    best      the fastest layouts that fit, fastest first
    families  (axis, value) -> its fastest layout that fits or, if none does, the one that fits least badly
    fits      every layout that fits
    seen      number of layouts whose memory was computed
    """

    job: Job
    best: list[Candidate] = field(default_factory=list)
    families: dict[tuple[str, object], Candidate | Misfit] = field(default_factory=dict)
    fits: list[Candidate] = field(default_factory=list)
    seen: int = 0

    @property
    def frontier(self) -> list[tuple[float, float]]:
        """(seconds, bytes) of the layouts than which no other is both faster and smaller, fastest first."""
        front, least = [], float("inf")
        for seconds, num_bytes in sorted((fit.seconds, fit.num_bytes) for fit in self.fits):
            if num_bytes < least:
                front.append((seconds, num_bytes))
                least = num_bytes
        return front

    @property
    def nearest(self) -> Misfit | None:
        """The layout that fits least badly, where nothing fits."""
        misfits = [found for found in self.families.values() if isinstance(found, Misfit)]
        return min(misfits, default=None)


def plan(job: Job, top: int = 10) -> Plan:
    """Search every legal layout of the job; keep the `top` fastest that fit."""
    found = Plan(job)
    for sizes in mesh_sizes(job):
        tp, pp, cp, ep, dp = sizes
        for zero in zero_stages(dp * cp):
            floor = CONTEXT_BYTES + state_floor(job, tp, pp, dp * cp, ep, zero)
            if floor > job.machine.memory_bytes:
                _note_frugal(found, Layout(dp, pp, cp, ep, tp, zero, recompute="full"))
            else:
                _search(job, sizes, zero, found)
    found.best = heapq.nsmallest(top, found.fits)
    return found


def mesh_sizes(job: Job) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield every (tp, pp, cp, ep, dp) that the model, the batch and the number of GPUs allow."""
    shape = job.shape
    for tp in divisors_of(job.gpus, shape.num_heads):
        for pp in (p for p in divisors(job.gpus // tp) if p <= shape.num_layers):
            rest = job.gpus // (tp * pp)
            for cp in divisors(rest):
                dp = rest // cp
                if job.batch % dp or (cp > 1 and job.seq_len % (2 * cp)):
                    continue
                for ep in divisors_of(dp * cp, shape.num_experts) if shape.num_experts else (1,):
                    if obstacle(job, Layout(dp, pp, cp, ep, tp)) is None:
                        yield tp, pp, cp, ep, dp


def divisors_of(a: int, b: int) -> list[int]:
    """Return what divides both."""
    return [d for d in divisors(min(a, b)) if a % d == 0 and b % d == 0]


def zero_stages(ranks: int) -> tuple[int, ...]:
    """Return the ZeRO stages to consider: all, but over one rank there is nothing to cut."""
    return (0, 1, 2, 3) if ranks > 1 else (0,)


def recomputations(job: Job) -> tuple[str, ...]:
    """Return the kinds of recomputation: selective repeats stored scores, which flash attention has not."""
    return ("none", "selective", "full") if job.implementation.attention == "dense" else ("none", "full")


def orders(job: Job, pp: int) -> list[tuple[str, int]]:
    """Return every schedule with its chunks per rank."""
    return [(name, v) for name in PLANNED for v in chunk_choices(name, job.shape.num_layers, pp)]


def _note_frugal(found: Plan, layout: Layout) -> None:
    excess = sum(worst_rank_memory(found.job, layout)[1].values()) - found.job.machine.memory_bytes
    _note_misfit(found, excess, layout)


def _repeats(zero: int, m: int) -> bool:
    """Whether a ZeRO-2 layout is ZeRO-1's: over several microbatches gradients accumulate whole, in either."""
    return zero == 2 and m > 1


def _search(job: Job, sizes: tuple, zero: int, found: Plan) -> None:
    tp, pp, cp, ep, dp = sizes
    microbatches = divisors(job.batch // dp)
    for schedule, chunks in orders(job, pp):
        for recompute in recomputations(job):
            for microbatch in microbatches:
                m = job.batch // (dp * microbatch)
                if not enough_microbatches(schedule, pp, m) or _repeats(zero, m):
                    continue
                layout = Layout(dp, pp, cp, ep, tp, zero, schedule, chunks, microbatch, recompute)
                if not _weigh(job, layout, found) and (zero < 2 or m == 1):
                    break


def _weigh(job: Job, layout: Layout, found: Plan) -> bool:
    """Enter the layout into the search's result. Returns whether it fits."""
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    found.seen += 1
    excess = num_bytes - job.machine.memory_bytes
    if excess > 0:
        _note_misfit(found, excess, layout)
        return False
    seconds = sum(step_parts(job, layout).values())
    candidate = Candidate(float(f"{seconds:.4g}"), num_bytes, layout, seconds)
    found.fits.append(candidate)
    for axis in FAMILIES:
        key = axis, getattr(layout, axis)
        best = found.families.get(key)
        if not isinstance(best, Candidate) or candidate < best:
            found.families[key] = candidate
    return True


def _note_misfit(found: Plan, excess: float, layout: Layout) -> None:
    for axis in FAMILIES:
        key = axis, getattr(layout, axis)
        best = found.families.get(key)
        if best is None or (isinstance(best, Misfit) and excess < best.excess):
            found.families[key] = Misfit(excess, layout)
