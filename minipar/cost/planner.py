"""The search of `minipar plan`: rank every legal layout that fits by predicted time, and find the best of each family.

A family is all layouts with one value of one axis: tp=16, or zero=0. A layout is legal if `why_illegal` gives no reason.

Predictions that differ by less than NEAR cannot be told apart (doubt.py). So among the layouts within NEAR of the fastest,
the plan chooses the simplest. What is `unusual`, and in no published run, is taken only if it saves more than NEAR twice
over, and leads no family but its own. Samples of at most LONG_TOKENS tokens are not split over cp, unless nothing else
fits.

Layouts are weighed in the order of a lower bound on their time, up to REACH times the best time found. What is slower is
only counted: it leads no family, and is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

from minipar.config.rules import expert_ranks
from minipar.cost.doubt import NEAR, USUAL_SCHEDULES, unusual
from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.memory import worst_rank_memory
from minipar.cost.stages import FORMS, chunk_choices, enough_microbatches
from minipar.cost.timing import least_seconds, step_parts
from minipar.support.errors import divisors

SEARCHED_CP = ("ring", "ulysses")  # all_gather sends as much as a ring, without overlap, and holds more
LONG_TOKENS = 8192
REACH = 2
FAMILIES = ("tp", "pp", "cp", "ep", "recompute", "zero", "schedule")
Family = tuple[str, object]  # axis, value


class Candidate(NamedTuple):
    """A layout that fits. Candidates are ordered by seconds (four digits), bytes on the fullest rank, and layout."""

    order: float
    num_bytes: float
    layout: Layout
    seconds: float

    @property
    def name(self) -> str:
        return self.layout.name


class Infeasible(NamedTuple):
    """A layout that does not fit, and by how many bytes it exceeds the memory."""

    excess: float
    layout: Layout


@dataclass
class Plan:
    """The result of a search.

    fits      the layouts that were weighed and fit, fastest first; `choice` may be a slightly slower one
    families  (axis, value) -> the family's fastest layout that fits; if none fits, the one that exceeds memory least
    seen      number of layouts that were weighed
    legal     number of legal layouts that were searched
    """

    job: Job
    top: int
    fits: list[Candidate] = field(default_factory=list)
    families: dict[Family, Candidate | Infeasible] = field(default_factory=dict)
    seen: int = 0
    legal: int = 0

    @property
    def best(self) -> list[Candidate]:
        """The `top` fastest layouts that fit, fastest first."""
        return self.fits[: self.top]

    @property
    def frontier(self) -> list[tuple[float, float]]:
        """The (seconds, bytes) of the layouts that no other beats in both, fastest first."""
        front: list[tuple[float, float]] = []
        for pair in sorted((c.seconds, c.num_bytes) for c in self.fits):
            if not front or pair[1] < front[-1][1]:
                front.append(pair)
        return front

    @property
    def leader(self) -> Candidate:
        """The fastest usual layout, or the fastest of all if that saves more than NEAR twice over."""
        fastest = self.fits[0]
        usual = next((c for c in self.fits if not unusual(self.job, c.layout)), fastest)
        return fastest if usual.seconds > (1 + NEAR) ** 2 * fastest.seconds else usual

    @property
    def near(self) -> list[Candidate]:
        """The layouts, unusual only if `leader` is, whose time the model cannot tell from the leader's, simplest first."""
        leader = self.leader
        odd, most = bool(unusual(self.job, leader.layout)), (1 + NEAR) * leader.seconds
        found = [c for c in self.fits if c.seconds <= most and bool(unusual(self.job, c.layout)) == odd]
        return sorted(found, key=lambda c: (simplicity(self.job, c.layout), c))

    @property
    def choice(self) -> Candidate:
        """The layout to use: the simplest of `near`."""
        return self.near[0]

    def shown(self) -> list[Candidate]:
        """Return the simplest near layout of each mesh, `choice` first; then leaders of families, on other meshes."""
        leaders = [c for c in self.families.values() if isinstance(c, Candidate)]
        found: dict[tuple[int, ...], Candidate] = {}
        for candidate in (*self.near, *sorted(leaders)):
            a = candidate.layout
            found.setdefault((a.dp, a.pp, a.cp, a.ep, a.tp), candidate)
        return list(found.values())[: self.top]

    @property
    def nearest(self) -> Infeasible | None:
        """The layout that exceeds the memory by the fewest bytes; used if nothing fits."""
        misfits = [found for found in self.families.values() if isinstance(found, Infeasible)]
        return min(misfits, default=None)


SIMPLE_ZERO = (1, 3, 0, 2)  # ZeRO-1 costs nothing; ZeRO-2 is rarely used


def is_short(job: Job) -> bool:
    """Return whether samples are too short to split them over cp, as few training programs do."""
    return job.seq_len <= LONG_TOKENS


def simplicity(job: Job, a: Layout) -> tuple[float, ...]:
    """Return a key that is smaller for a simpler layout.

    First the number of ways in which the work is split: dp does not count, since it changes no model. Then common practice:
    tp rather than pp, experts spread over ep, the schedules of USUAL_SCHEDULES, no recomputation, ZeRO stages in the order
    of SIMPLE_ZERO, one chunk.
    """
    ways = sum(size > 1 for size in (a.pp, a.cp, a.ep, a.tp))
    order = USUAL_SCHEDULES.index(a.schedule) if a.schedule in USUAL_SCHEDULES else len(USUAL_SCHEDULES)
    return (
        ways, bool(unusual(job, a)), a.pp > 1, job.shape.num_experts > 0 and a.ep == 1, a.pp > 1 and order,
        a.recompute != "none", SIMPLE_ZERO.index(a.zero), a.cp if is_short(job) else 0, a.chunks,
    )  # fmt: skip


class Cell(NamedTuple):
    """Layouts that differ only in ZeRO stage and order, and a lower bound on their seconds per step."""

    seconds: float
    layout: Layout


def plan(job: Job, top: int = 10) -> Plan:
    """Search the legal layouts of the job; of those that fit, `best` has the `top` fastest."""
    for split_short in (False, True):
        found, fastest_s = Plan(job, top), inf
        slow: set[Family] = set()
        for cell in sorted(_cells(job, split_short)):
            ways = _ways(job, cell.layout)
            found.legal += len(ways)
            if cell.seconds <= REACH * fastest_s:
                found.seen += len(ways)
                for zero, order in ways:
                    fastest_s = min(fastest_s, _weigh(found, cell.layout.with_order(zero, *order)))
            else:
                slow.update(*(families_of(job, cell.layout.with_order(z, *order)) for z, order in ways))
        # What is too large may have a slow layout that is not.
        for key in slow:
            if isinstance(found.families.get(key), Infeasible):
                del found.families[key]
        found.fits.sort()
        if found.fits or not is_short(job):
            break
    return found


def _cells(job: Job, split_short: bool) -> Iterator[Cell]:
    for tp, pp, cp, ep, dp in mesh_sizes(job):
        if cp > 1 and is_short(job) and not split_short:
            continue
        for how in SEARCHED_CP if cp > 1 else ("ring",):
            if how != "ring" and why_illegal(job, Layout(dp, pp, cp, ep, tp, cp_attention=how)):
                continue
            for recompute in recomputations(job):
                for microbatch in divisors(job.batch // dp):
                    layout = Layout(dp, pp, cp, ep, tp, 0, "1f1b", 1, microbatch, recompute, how)
                    yield Cell(least_seconds(job, layout), layout)


def _ways(job: Job, a: Layout) -> list[tuple[int, Order]]:
    """Return every ZeRO stage and order for a cell's layout.

    Where unsharded gradients accumulate over several microbatches, ZeRO-2 is like ZeRO-1, and left out.
    """
    m = a.microbatches(job)
    accumulates = m > 1 and job.implementation.reduce_every == "step"
    zeros = (zero for zero in zero_stages(a.dp * a.cp) if not (zero == 2 and accumulates))
    return list(product(zeros, orders(job.shape.num_layers, a.pp, a.unit, m)))


def _weigh(found: Plan, layout: Layout) -> float:
    """Enter a layout into `found`; return its seconds per step, or infinity if it does not fit."""
    job, keys = found.job, families_of(found.job, layout)
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    excess = num_bytes - job.room_bytes
    if excess > 0:
        for key in keys:
            best = found.families.get(key)
            if best is None or (isinstance(best, Infeasible) and excess < best.excess):
                found.families[key] = Infeasible(excess, layout)
        return inf
    seconds = sum(step_parts(job, layout).values())
    candidate = Candidate(float(f"{seconds:.4g}"), num_bytes, layout, seconds)
    found.fits.append(candidate)
    for key in keys:
        best = found.families.get(key)
        if not isinstance(best, Candidate) or candidate < best:
            found.families[key] = candidate
    return seconds


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
                spread = expert_ranks(dp, cp, tp, job.implementation.fold_experts)
                for ep in divisors_of(spread, shape.num_experts) if shape.num_experts else (1,):
                    if why_illegal(job, Layout(dp, pp, cp, ep, tp)) is None:
                        yield tp, pp, cp, ep, dp


def divisors_of(a: int, b: int) -> list[int]:
    """Return the common divisors of a and b."""
    return [d for d in divisors(min(a, b)) if a % d == 0 and b % d == 0]


def zero_stages(ranks: int) -> tuple[int, ...]:
    """Return the ZeRO stages to consider: all of them, or only 0 if there is one rank and nothing to shard."""
    return (0, 1, 2, 3) if ranks > 1 else (0,)


def recomputations(job: Job) -> tuple[str, ...]:
    """Return the kinds of recomputation to consider.

    These are "selective" only with dense attention, which stores scores, and what the program has of PARTIAL.
    """
    units = (f"every:{n}" for n in (2, 4, 8) if n <= job.shape.num_layers)
    dense = ("selective",) if job.implementation.attention == "dense" else ()
    return ("none", *dense, *job.implementation.partial, "full", *units)


class Order(NamedTuple):
    """An order of the pipeline's work: a schedule, and chunks per rank."""

    schedule: str
    chunks: int


# Never faster than another schedule that needs no more memory: 1f1b, interleaved, zb-h2. They are not searched.
DOMINATED = ("gpipe", "breadth-first", "zb-auto")
SEARCHED = tuple(name for name in FORMS if name not in DOMINATED)


@cache
def orders(layers: int, pp: int, unit: int, m: int) -> list[Order]:
    """Return every order that m microbatches fill, and whose largest stage has `unit` or more layers."""
    filled = (name for name in SEARCHED if enough_microbatches(name, pp, m))
    found = (Order(name, v) for name in filled for v in chunk_choices(name, layers, pp))
    return [order for order in found if unit < 2 or unit <= -(-layers // (pp * order.chunks))]


def families_of(job: Job, layout: Layout) -> list[Family]:
    """Return the families that a layout may lead: all of its own or, if it is unusual, that of what is unusual."""
    odd = {"tp"} if layout.tp > job.machine.gpus_per_node else set()
    if layout.pp > 1 and layout.schedule not in USUAL_SCHEDULES:
        odd.add("schedule")
    return [(axis, getattr(layout, axis)) for axis in FAMILIES if odd <= {axis}]
