"""The search of `minipar plan`: rank every legal layout that fits by predicted time, and find the best of each family.

A family is all layouts with one value of one axis: tp=16, or zero=0. A layout is legal if `why_illegal` gives no reason.

Predictions that differ by less than NEAR cannot be told apart: the model is wrong by more (doubt.py). So among the
layouts within NEAR of the fastest, the plan chooses the simplest. What is `unusual`, and therefore in no published run
that the model was compared with, is used only if it is faster even when both predictions are off by their doubt: cp for
samples of at most LONG_TOKENS tokens, schedules other than USUAL_SCHEDULES, and tp beyond a node.

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
from typing import NamedTuple

from minipar.config.rules import expert_ranks
from minipar.cost.doubt import SPREADS, WIDEST, comparison_doubt
from minipar.cost.layout import Job, Layout, why_illegal
from minipar.cost.memory import activation_bytes, state_floor, worst_rank_memory
from minipar.cost.stages import chunk_choices, enough_microbatches, forms_of, least_idle, planned
from minipar.cost.timing import least_seconds, step_parts
from minipar.support.errors import divisors

SEARCHED_CP = ("ring", "ulysses")  # all_gather sends as much as a ring, without overlap, and holds more
LONG_TOKENS = 8192  # for samples of at most this length, few training programs use cp
NEAR = min(SPREADS.values())  # times within this fraction of the best, the smallest doubt, count as equal
FRONT_REACH = 2  # the Pareto front goes up to this many times the best time
FAMILIES = ("tp", "pp", "cp", "ep", "cp_attention", "recompute", "microbatch", "zero", "schedule", "slices")
OF_CELL = FAMILIES[:7]
Family = tuple[str, object]  # axis, value
USUAL_SCHEDULES = ("1f1b", "gpipe", "interleaved")  # simplest first; all others come after them


class Unusual(NamedTuple):
    """Features that few programs have, and no published run of docs/generated/planner.md; the least unusual comes last.

    tp        tensor parallelism beyond a node
    schedule  a schedule other than USUAL_SCHEDULES
    cp        context parallelism for samples of at most LONG_TOKENS tokens
    """

    tp: bool
    schedule: bool
    cp: bool


def unusual(job: Job, a: Layout) -> Unusual:
    return Unusual(
        a.tp > job.machine.gpus_per_node,
        a.pp > 1 and a.schedule not in USUAL_SCHEDULES,
        a.cp > 1 and job.seq_len <= LONG_TOKENS,
    )


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


def unusual_words(job: Job, a: Layout, other: Layout) -> str:
    """Say what is unusual in layout a and not in the other; "" if nothing is."""
    names = (f"tp={a.tp}, more than a node", a.schedule, f"cp={a.cp}")
    spared = zip(names, unusual(job, a), unusual(job, other))
    return " and ".join(name for name, mine, others in spared if mine and not others)


@dataclass
class Plan:
    """The result of a search.

    schedules the schedules searched
    best      the fastest layouts that fit, fastest first; `choice` may be a slightly slower one
    families  (axis, value) -> the family's fastest layout that fits; if none fits, the one that exceeds memory least
    leaders   the fastest layout that fits of each combination of unusual features
    fits      the layouts that were evaluated and fit
    seen      number of layouts whose memory was computed
    legal     number of legal layouts
    frontier  the Pareto front of (seconds, bytes), fastest first; complete up to FRONT_REACH times the best time
    """

    job: Job
    top: int
    schedules: tuple[str, ...]
    best: list[Candidate] = field(default_factory=list)
    families: dict[Family, Candidate | Infeasible] = field(default_factory=dict)
    leaders: dict[Unusual, Candidate] = field(default_factory=dict)
    fits: list[Candidate] = field(default_factory=list)
    seen: int = 0
    legal: int = 0
    frontier: list[tuple[float, float]] = field(default_factory=list)

    @property
    def leader(self) -> Candidate:
        """The fastest layout with the fewest unusual features whose time cannot be told from that of `best[0]`.

        Two times cannot be told apart if both predictions may be off by their doubt, in opposite directions, so that
        nothing is saved.
        """
        fastest = self.best[0]
        most = (1 + comparison_doubt(self.job, fastest.layout)) * fastest.seconds
        usual_first = sorted(self.leaders.items(), key=lambda item: (sum(item[0]), item[0]))
        return next(
            c for _, c in usual_first if (1 - comparison_doubt(self.job, c.layout)) * c.seconds <= most
        )

    @property
    def near(self) -> list[Candidate]:
        """The layouts as unusual as `leader` whose time the model cannot tell from the leader's, simplest first."""
        leader = self.leader
        as_usual, most = unusual(self.job, leader.layout), (1 + NEAR) * leader.seconds
        found = [c for c in self.fits if c.seconds <= most and unusual(self.job, c.layout) == as_usual]
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
            found.setdefault(mesh_of(candidate.layout), candidate)
        return list(found.values())[: self.top]

    @property
    def nearest(self) -> Infeasible | None:
        """The layout that exceeds the memory by the fewest bytes; used if nothing fits."""
        misfits = [found for found in self.families.values() if isinstance(found, Infeasible)]
        return min(misfits, default=None)


SIMPLE_ZERO = (1, 3, 0, 2)  # ZeRO-1 costs nothing; ZeRO-2 is rarely used


def mesh_of(a: Layout) -> tuple[int, ...]:
    return a.dp, a.pp, a.cp, a.ep, a.tp


def simplicity(job: Job, a: Layout) -> tuple[float, ...]:
    """Return a key that is smaller for a simpler layout.

    First the number of ways in which the work is split: slices of samples count, dp does not, since it changes no
    model. Then common practice: no cp up to LONG_TOKENS tokens, tp inside a node, experts spread over ep, the schedules of
    USUAL_SCHEDULES, no recomputation, ZeRO stages in the order of SIMPLE_ZERO, short samples in few parts, one chunk.
    """
    ways = sum(size > 1 for size in (a.pp, a.cp, a.ep, a.tp, a.slices))
    order = USUAL_SCHEDULES.index(a.schedule) if a.schedule in USUAL_SCHEDULES else len(USUAL_SCHEDULES)
    short = job.seq_len <= LONG_TOKENS
    return (
        ways, a.cp > 1 and short, a.tp > job.machine.gpus_per_node,
        job.shape.num_experts > 0 and a.ep == 1, a.pp > 1 and order, a.recompute != "none",
        SIMPLE_ZERO.index(a.zero), short and a.cp, a.chunks,
    )  # fmt: skip


class Cell(NamedTuple):
    """Layouts that differ only in ZeRO stage and schedule, and a lower bound on their seconds per step."""

    seconds: float
    layout: Layout


def plan(job: Job, top: int = 10) -> Plan:
    """Search every legal layout of the job; keep the `top` fastest that fit."""
    found = Plan(job, top, planned())
    for cell in sorted(_cells(job)):
        _search(job, cell, found)
    return found


def _cells(job: Job) -> Iterator[Cell]:
    for tp, pp, cp, ep, dp in mesh_sizes(job):
        for how in SEARCHED_CP if cp > 1 else ("ring",):
            if how != "ring" and why_illegal(job, Layout(dp, pp, cp, ep, tp, cp_attention=how)):
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
    """An order of the pipeline's work: a schedule, chunks per rank, and slices per sample."""

    schedule: str
    chunks: int
    slices: int


@cache
def orders(job: Job, pp: int, unit: int, schedules: tuple[str, ...], cp: int, tp: int) -> list[Order]:
    """Return every order of these schedules whose largest stage has `unit` or more layers, as "every:unit" requires."""
    layers, found = job.shape.num_layers, []
    for name in schedules:
        chunks = [v for v in chunk_choices(name, layers, pp) if unit < 2 or unit <= -(-layers // (pp * v))]
        cuts = forms_of(name).slice_choices(job, Layout(cp=cp, tp=tp, schedule=name))
        found += [Order(name, v, slices) for v in chunks for slices in cuts]
    return found


def _accumulates(job: Job, m: int) -> bool:
    """Return whether unsharded gradients accumulate over m microbatches. ZeRO-2 is then like ZeRO-1."""
    return m > 1 and job.implementation.reduce_every == "step"


def _search(job: Job, cell: Cell, found: Plan) -> None:
    a, m = cell.layout, cell.layout.microbatches(job)
    zeros = [zero for zero in zero_stages(a.dp * a.cp) if not (zero == 2 and _accumulates(job, m))]
    possible = orders(job, a.pp, a.unit, found.schedules, a.cp, a.tp)
    ways = [order for order in possible if enough_microbatches(order.schedule, a.pp, m)]
    found.legal += len(zeros) * len(ways)
    floors = {zero: _memory_floor(job, a, zero, m) for zero in zeros}
    keys = [(axis, getattr(a, axis)) for axis in OF_CELL]
    keys += [("zero", zero) for zero in zeros] + [("schedule", schedule) for schedule, *_ in ways]
    keys += {("slices", slices) for *_, slices in ways}
    habits = {unusual(job, a.with_order(0, *order)) for order in ways}
    if not _matters(found, keys, habits, cell.seconds, min(floors.values())):
        return
    for zero, floor in floors.items():
        # ZeRO-3 has a higher bound, because it gathers weights.
        least = least_seconds(job, a.with_order(3, "1f1b", 1)) if zero == 3 else cell.seconds
        for schedule, chunks, slices in ways:
            layout = a.with_order(zero, schedule, chunks, slices)
            least_s = least * (1 + least_idle(schedule, a.pp, m, chunks, slices))
            if _matters(found, _families_of(layout), {unusual(job, layout)}, least_s, floor):
                evaluate(layout, least_s, found)


def _families_of(layout: Layout) -> list[Family]:
    return [(axis, getattr(layout, axis)) for axis in FAMILIES]


def _matters(
    found: Plan, families: list[Family], habits: set[Unusual], seconds: float, num_bytes: float
) -> bool:
    """Return whether a layout that needs at least `seconds` and `num_bytes` could change `found`.

    The layout is of these families, and has one of these combinations of unusual features.
    """
    leaders = [found.families.get(key) for key in families]
    excess = num_bytes - found.job.room_bytes
    if excess > 0:
        return any(
            best is None or (isinstance(best, Infeasible) and excess < best.excess) for best in leaders
        )
    order = _order(seconds)
    if any(_may_be_near(found, habit, seconds) for habit in habits):
        return True
    for best in leaders:
        if not isinstance(best, Candidate) or order <= best.order:
            return True
    return not _beaten(found, seconds, num_bytes)


def _may_be_near(found: Plan, habit: Unusual, seconds: float) -> bool:
    """Return whether a layout that needs at least `seconds` could enter `found.near`, by its unusual features."""
    if not found.best:
        return True
    if (1 - WIDEST) * seconds > (1 + NEAR) * (1 + WIDEST) * found.best[0].seconds:
        return False  # slower than the fastest by more than any doubt
    leader = found.leaders.get(habit)
    return leader is None or seconds <= (1 + NEAR) * leader.seconds


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


def _memory_floor(job: Job, a: Layout, zero: int, m: int) -> float:
    kept = activation_bytes(job, a.tp, a.cp, a.microbatch, "full" if a.unit else a.recompute, False)
    states = state_floor(job, a.tp, a.pp, a.dp * a.cp, a.ep, zero, accumulates=_accumulates(job, m))
    return job.machine.context_bytes + states + job.shape.num_layers / a.pp / max(1, a.unit) * kept


def evaluate(layout: Layout, least_s: float, found: Plan) -> None:
    """Evaluate a layout and enter it into `found`; `least_s` is a lower bound on its time."""
    job = found.job
    num_bytes = sum(worst_rank_memory(job, layout)[1].values())
    found.seen += 1
    excess = num_bytes - job.room_bytes
    keys = _families_of(layout)
    if excess > 0:
        for key in keys:
            best = found.families.get(key)
            if best is None or (isinstance(best, Infeasible) and excess < best.excess):
                found.families[key] = Infeasible(excess, layout)
        return
    habit = unusual(job, layout)
    if not _matters(found, keys, {habit}, least_s, num_bytes):
        return
    seconds = sum(step_parts(job, layout).values())
    candidate = Candidate(_order(seconds), num_bytes, layout, seconds)
    found.fits.append(candidate)
    for key in keys:
        best = found.families.get(key)
        if not isinstance(best, Candidate) or candidate < best:
            found.families[key] = candidate
    if habit not in found.leaders or candidate < found.leaders[habit]:
        found.leaders[habit] = candidate
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
