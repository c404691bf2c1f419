"""The search of `minipar plan`: rank every legal layout that fits by predicted time, and find the best of each family.

A family is all layouts with one value of one axis: tp=16, or zero=0. A layout is legal if `why_illegal` gives no reason.

Predictions that differ by less than NEAR cannot be told apart (doubt.py). So among the layouts within NEAR of the fastest,
the plan chooses the simplest. What is `unusual`, and in no published run, is taken only if it saves more than NEAR twice
over, and leads no family but its own. Samples of at most LONG_TOKENS tokens are not split over cp, unless nothing else
fits.

The search visits layouts in the order of a lower bound on their time. It evaluates a layout only if that layout could be
near the best, enter the table, lead a family, or lie on the Pareto front of time and memory. So the result is the same as
if every layout were evaluated. The lower bound on time leaves out idle ranks and gradients; the lower bound on memory is an
even share of the states plus one microbatch's activations.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import NamedTuple

from minipar.config.rules import expert_ranks
from minipar.cost.doubt import NEAR, USUAL_SCHEDULES, unusual
from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.memory import activation_bytes, state_floor, worst_rank_memory
from minipar.cost.stages import FORMS, chunk_choices, enough_microbatches, least_idle, live_chunks
from minipar.cost.timing import least_seconds, step_parts
from minipar.support.errors import divisors

SEARCHED_CP = ("ring", "ulysses")  # all_gather sends as much as a ring, without overlap, and holds more
LONG_TOKENS = 8192
FRONT_REACH = 2  # the Pareto front goes up to this many times the best time
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

    best      the fastest layouts that fit, fastest first; `choice` may be a slightly slower one
    usual     the fastest layout that fits and is not unusual
    families  (axis, value) -> the family's fastest layout that fits; if none fits, the one that exceeds memory least
    fits      the layouts that were evaluated and fit
    seen      number of layouts whose memory was computed
    legal     number of legal layouts that were searched
    frontier  the Pareto front of (seconds, bytes), fastest first; complete up to FRONT_REACH times the best time
    """

    job: Job
    top: int
    best: list[Candidate] = field(default_factory=list)
    usual: Candidate | None = None
    families: dict[Family, Candidate | Infeasible] = field(default_factory=dict)
    fits: list[Candidate] = field(default_factory=list)
    seen: int = 0
    legal: int = 0
    frontier: list[tuple[float, float]] = field(default_factory=list)

    @property
    def leader(self) -> Candidate:
        """The fastest usual layout, or the fastest of all if that saves more than NEAR twice over."""
        fastest = self.best[0]
        if self.usual is None or self.usual.seconds > (1 + NEAR) ** 2 * fastest.seconds:
            return fastest
        return self.usual

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
    """Layouts that differ only in ZeRO stage and schedule, and a lower bound on their seconds per step."""

    seconds: float
    layout: Layout


def plan(job: Job, top: int = 10) -> Plan:
    """Search the legal layouts of the job; keep the `top` fastest that fit."""
    for split_short in (False, True):
        found = Plan(job, top)
        for cell in sorted(_cells(job, split_short)):
            _search(job, cell, found)
        if found.best or not is_short(job):
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
                    kept = _share(job, layout) * _kept_floor(job, layout)
                    fits = min(_states_floors(job, layout).values()) + kept <= job.room_bytes
                    yield Cell(least_seconds(job, layout) if fits else inf, layout)


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


def _search(job: Job, cell: Cell, found: Plan) -> None:
    a, m = cell.layout, cell.layout.microbatches(job)
    states, ways, kept = (
        _states_floors(job, a),
        orders(job.shape.num_layers, a.pp, a.unit, m),
        _kept_floor(job, a),
    )
    found.legal += len(states) * len(ways)
    layers = {order: _layers_kept(job, a.pp, order, m) / max(1, a.unit) for order in ways}
    for zero, num_bytes in states.items():
        least_s = cell.seconds
        if zero == 3 and num_bytes + _share(job, a) * kept <= job.room_bytes:
            least_s = least_seconds(job, a.with_order(3, "1f1b", 1))  # higher, because it gathers weights
        for order in ways:
            idle = 1 + least_idle(order.schedule, a.pp, m, order.chunks)
            layout = a.with_order(zero, *order)
            if _matters(found, layout, idle * least_s, num_bytes + layers[order] * kept):
                evaluate(layout, idle * least_s, found)


def _share(job: Job, a: Layout) -> float:
    """Return an even share of the layers that keep their input, or all of their activations."""
    return job.shape.num_layers / a.pp / max(1, a.unit)


@cache
def _layers_kept(job: Job, pp: int, order: Order, m: int) -> float:
    """Return how many layers' activations a rank keeps at once, at least, on average over the ranks."""
    layers = job.shape.num_layers
    live = sum(live_chunks(order.schedule, rank, pp, m, order.chunks) for rank in range(pp))
    return max(layers / pp, live / pp * (layers // (pp * order.chunks)))


def families_of(job: Job, layout: Layout) -> list[Family]:
    """Return the families that a layout may lead: all of its own or, if it is unusual, that of what is unusual."""
    odd = {"tp"} if layout.tp > job.machine.gpus_per_node else set()
    if layout.pp > 1 and layout.schedule not in USUAL_SCHEDULES:
        odd.add("schedule")
    return [(axis, getattr(layout, axis)) for axis in FAMILIES if odd <= {axis}]


def _matters(found: Plan, layout: Layout, seconds: float, num_bytes: float) -> bool:
    """Return whether a layout that needs at least `seconds` and `num_bytes` could change `found`."""
    excess = num_bytes - found.job.room_bytes
    if excess <= 0:
        if (
            not found.best
            or seconds <= (1 + NEAR) * found.best[0].seconds
            or not _beaten(found, seconds, num_bytes)
        ):
            return True
        if not unusual(found.job, layout) and (
            found.usual is None or seconds <= (1 + NEAR) * found.usual.seconds
        ):
            return True
    order = _order(seconds)
    for best in map(found.families.get, families_of(found.job, layout)):
        if isinstance(best, Candidate):
            if excess <= 0 and order <= best.order:
                return True
        elif best is None or excess < best.excess:
            return True
    return False


def _order(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _beaten(found: Plan, seconds: float, num_bytes: float) -> bool:
    """Return whether a layout that needs at least `seconds` and `num_bytes` cannot enter `best` or the Pareto front."""
    if len(found.best) < found.top or _order(seconds) <= found.best[-1].order:
        return False
    if seconds > FRONT_REACH * found.best[0].seconds:
        return True
    faster = bisect_right(found.frontier, (seconds, float("inf")))
    return faster > 0 and found.frontier[faster - 1][1] <= num_bytes


def _states_floors(job: Job, a: Layout) -> dict[int, float]:
    """Return, for each ZeRO stage to consider, a lower bound on the bytes of states and of CUDA's context.

    Where unsharded gradients accumulate over several microbatches, ZeRO-2 is like ZeRO-1, and not considered.
    """
    accumulates = a.microbatches(job) > 1 and job.implementation.reduce_every == "step"
    zeros = [zero for zero in zero_stages(a.dp * a.cp) if not (zero == 2 and accumulates)]
    return {
        zero: job.machine.context_bytes + state_floor(job, a.tp, a.pp, a.dp * a.cp, a.ep, zero, accumulates)
        for zero in zeros
    }


def _kept_floor(job: Job, a: Layout) -> float:
    return activation_bytes(job, a.tp, a.cp, a.microbatch, "full" if a.unit else a.recompute, False)


def evaluate(layout: Layout, least_s: float, found: Plan) -> None:
    """Evaluate a layout and enter it into `found`; `least_s` is a lower bound on its time."""
    job, keys = found.job, families_of(found.job, layout)
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    found.seen += 1
    excess = num_bytes - job.room_bytes
    if excess > 0:
        for key in keys:
            best = found.families.get(key)
            if best is None or (isinstance(best, Infeasible) and excess < best.excess):
                found.families[key] = Infeasible(excess, layout)
        return
    if not _matters(found, layout, least_s, num_bytes):
        return
    seconds = sum(step_parts(job, layout).values())
    candidate = Candidate(_order(seconds), num_bytes, layout, seconds)
    found.fits.append(candidate)
    for key in keys:
        best = found.families.get(key)
        if not isinstance(best, Candidate) or candidate < best:
            found.families[key] = candidate
    if not unusual(job, layout) and (found.usual is None or candidate < found.usual):
        found.usual = candidate
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
