"""Every legal layout of a job, those that fit ranked by predicted time, and the best of each family that lost.

A family is all layouts with one value of one axis: tp=16, or zero=0. Legal is what `obstacle` has nothing against. Layouts
are met in the order of a lower bound of their time, and one is weighed only if it could still matter: enter the best, lead
a family, or lie on the front of time against memory. What is passed over can do none of these, so that the result is that
of weighing all. The bounds: time without idle ranks and without gradients; memory of an even share of the states, and of
one microbatch's activations.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from minipar.cost.layout import Job, Layout, obstacle
from minipar.cost.memory import activation_bytes, state_floor, worst_rank_memory
from minipar.cost.slices import slice_choices
from minipar.cost.stages import PLANNED, chunk_choices, enough_microbatches, least_idle
from minipar.cost.timing import least_seconds, step_parts
from minipar.errors import divisors
from minipar.schedules.registry import SLICED

SEARCHED_CP = ("ring", "ulysses")  # all_gather sends as much as a ring, waits for it, and holds more
SEARCHED_SCHEDULES = tuple(
    name for name in PLANNED if name != "terapipe"
)  # seq1f1b waits as long, and holds less
FRONT_REACH = 2  # the front of time against memory goes up to so many times the best time
FAMILIES = ("tp", "pp", "cp", "ep", "cp_attention", "recompute", "microbatch", "zero", "schedule", "slices")
OF_CELL = FAMILIES[:7]


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
    fits      the layouts that were weighed and fit
    seen      number of layouts whose memory was computed
    legal     number of legal layouts
    frontier  (seconds, bytes) of the layouts than which no other is both faster and smaller, fastest first; complete up
              to FRONT_REACH times the best time
    """

    job: Job
    top: int
    best: list[Candidate] = field(default_factory=list)
    families: dict[tuple[str, object], Candidate | Misfit] = field(default_factory=dict)
    fits: list[Candidate] = field(default_factory=list)
    seen: int = 0
    legal: int = 0
    frontier: list[tuple[float, float]] = field(default_factory=list)

    @property
    def nearest(self) -> Misfit | None:
        """The layout that fits least badly, where nothing fits."""
        misfits = [found for found in self.families.values() if isinstance(found, Misfit)]
        return min(misfits, default=None)


class Cell(NamedTuple):
    """Layouts that differ in zero and schedule alone, and a lower bound of their seconds."""

    seconds: float
    layout: Layout


def plan(job: Job, top: int = 10) -> Plan:
    """Search every legal layout of the job; keep the `top` fastest that fit."""
    found = Plan(job, top)
    for cell in sorted(_cells(job)):
        _search(job, cell, found)
    return found


def _cells(job: Job) -> Iterator[Cell]:
    for tp, pp, cp, ep, dp in mesh_sizes(job):
        for how in SEARCHED_CP if cp > 1 else ("ring",):
            if how != "ring" and obstacle(job, Layout(dp, pp, cp, ep, tp, cp_attention=how)):
                continue
            for recompute in recomputations(job):
                for microbatch in divisors(job.batch // dp):
                    layout = Layout(dp, pp, cp, ep, tp, 0, "1f1b", 1, microbatch, recompute, how)
                    yield Cell(least_seconds(job, layout), layout)


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
    units = (f"every:{n}" for n in (2, 4, 8) if n <= job.shape.num_layers)
    dense = ("selective",) if job.implementation.attention == "dense" else ()
    return ("none", *dense, "full", *units)


@cache
def orders(job: Job, pp: int, unit: int, cuts: tuple[int, ...] = ()) -> list[tuple[str, int, int]]:
    """Return every schedule with its chunks and slices, of `cuts`, if its stages have as many layers as a unit."""
    layers, found = job.shape.num_layers, []
    for name in SEARCHED_SCHEDULES:
        chunks = [v for v in chunk_choices(name, layers, pp) if unit < 2 or unit <= -(-layers // (pp * v))]
        found += [(name, v, slices) for v in chunks for slices in (cuts if name in SLICED else (1,))]
    return found


def _repeats(zero: int, m: int) -> bool:
    """Whether a ZeRO-2 layout is ZeRO-1's: over several microbatches gradients accumulate whole, in either."""
    return zero == 2 and m > 1


def _search(job: Job, cell: Cell, found: Plan) -> None:
    a, m = cell.layout, cell.layout.microbatches(job)
    zeros = [zero for zero in zero_stages(a.dp * a.cp) if not _repeats(zero, m)]
    cuts = slice_choices(job, Layout(cp=a.cp, tp=a.tp, schedule=SLICED[0]))
    ways = [way for way in orders(job, a.pp, a.unit, cuts) if enough_microbatches(way[0], a.pp, m)]
    found.legal += len(zeros) * len(ways)
    floors = {zero: _memory_floor(job, a, zero, m) for zero in zeros}
    keys = [(axis, getattr(a, axis)) for axis in OF_CELL]
    keys += [("zero", zero) for zero in zeros] + [("schedule", schedule) for schedule, *_ in ways]
    keys += {("slices", slices) for *_, slices in ways}
    if not _matters(found, keys, cell.seconds, min(floors.values())):
        return
    for zero, floor in floors.items():
        # ZeRO-3 gathers weights.
        least = least_seconds(job, a.with_order(3, "1f1b", 1)) if zero == 3 else cell.seconds
        for schedule, chunks, slices in ways:
            layout = a.with_order(zero, schedule, chunks, slices)
            least_s = least * (1 + least_idle(schedule, a.pp, m, chunks, slices))
            if _matters(found, _families_of(layout), least_s, floor):
                _weigh(layout, least_s, found)


def _families_of(layout: Layout) -> list[tuple[str, object]]:
    return [(axis, getattr(layout, axis)) for axis in FAMILIES]


def _matters(found: Plan, families: list, seconds: float, num_bytes: float) -> bool:
    """Whether layouts of these families that take at least so many seconds and bytes may change the result."""
    leaders = [found.families.get(key) for key in families]
    excess = num_bytes - found.job.machine.memory_bytes
    if excess > 0:
        return any(best is None or (isinstance(best, Misfit) and excess < best.excess) for best in leaders)
    order = _order(seconds)
    for best in leaders:
        if not isinstance(best, Candidate) or order <= best.order:
            return True
    return not _beaten(found, seconds, num_bytes)


def _order(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _beaten(found: Plan, seconds: float, num_bytes: float) -> bool:
    """Whether layouts of at least so many seconds and bytes can neither be among the best nor on the front."""
    if len(found.best) < found.top or _order(seconds) <= found.best[-1].order:
        return False
    if seconds > FRONT_REACH * found.best[0].seconds:
        return True
    faster = bisect_right(found.frontier, (seconds, float("inf")))
    return faster > 0 and found.frontier[faster - 1][1] <= num_bytes


def _memory_floor(job: Job, a: Layout, zero: int, m: int) -> float:
    kept = activation_bytes(job, a.tp, a.cp, a.microbatch, "full" if a.unit else a.recompute, False)
    states = state_floor(job, a.tp, a.pp, a.dp * a.cp, a.ep, zero, accumulates=m > 1)
    return job.machine.context_bytes + states + job.shape.num_layers / a.pp / max(1, a.unit) * kept


def _weigh(layout: Layout, least_s: float, found: Plan) -> None:
    """Enter the layout, which takes at least `least_s`, into the search's result."""
    job = found.job
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    found.seen += 1
    excess = num_bytes - job.machine.memory_bytes
    keys = _families_of(layout)
    if excess > 0:
        for key in keys:
            best = found.families.get(key)
            if best is None or (isinstance(best, Misfit) and excess < best.excess):
                found.families[key] = Misfit(excess, layout)
        return
    if not _matters(found, keys, least_s, num_bytes):
        return
    seconds = sum(step_parts(job, layout).values())
    candidate = Candidate(_order(seconds), num_bytes, layout, seconds)
    found.fits.append(candidate)
    for key in keys:
        best = found.families.get(key)
        if not isinstance(best, Candidate) or candidate < best:
            found.families[key] = candidate
    insort(found.best, candidate)
    del found.best[found.top :]
    _extend_front(found.frontier, seconds, num_bytes)


def _extend_front(front: list[tuple[float, float]], seconds: float, num_bytes: float) -> None:
    at = bisect_right(front, (seconds, num_bytes))
    if at and front[at - 1][1] <= num_bytes:
        return
    end = at
    while end < len(front) and front[end][1] >= num_bytes:
        end += 1
    front[at:end] = [(seconds, num_bytes)]
