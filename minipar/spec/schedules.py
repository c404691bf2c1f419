"""Specifications of pipeline schedules as data: complete, without a cycle, with the time and memory their papers state."""

from __future__ import annotations

from collections.abc import Callable

from minipar.schedules import Costs, Schedule, simulate, validate
from minipar.spec.specification import Specification, Stage, on_one_rank

SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 4, 7)]


def _valid(make, p: int, m: int) -> str | None:
    try:
        schedule = make(p, m)
        if not isinstance(schedule, Schedule):
            return f"with p={p}, m={m} it returned a {type(schedule).__name__}; return a Schedule"
        validate(schedule)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        return f"with p={p}, m={m}: {error}"
    return None


def _as_said(make, p: int, m: int, span: Callable, peak: Callable) -> str | None:
    timeline = simulate(make(p, m), Costs(F=1, I=1, W=1))
    if timeline.longest_own_span > span(p, m) + 1e-9:
        return f"with p={p}, m={m} and F=I=W=1 a rank takes {timeline.longest_own_span:g}; this order takes {span(p, m):g}"
    for rank, live in enumerate(timeline.peak_live):
        if live > peak(p, rank, m):
            return f"with p={p}, m={m} rank {rank} keeps {live} microbatches alive; this order needs {peak(p, rank, m)}"
    return None


def _at_every_size(make, test: Callable, *args) -> str | None:
    return next(filter(None, (test(make, p, m, *args) for p, m in SIZES)), None)


def _refuses(make) -> str | None:
    for p, m in ((0, 1), (1, 0), (2, -1)):
        try:
            make(p, m)
        except ValueError:
            continue
        return f"with p={p}, m={m} it returned a schedule; raise a ValueError that names the argument"
    return None


def _specification(name: str, says: str, span: Callable, peak: Callable) -> Specification:
    stages = (
        Stage("runs", lambda f: on_one_rank(_valid, f, 1, 1)),
        Stage("small", lambda f: on_one_rank(_valid, f, 2, 3) or on_one_rank(_as_said, f, 2, 3, span, peak)),
        Stage("drawn", lambda f: on_one_rank(_at_every_size, f, _valid)),
        Stage("memory", lambda f: on_one_rank(_at_every_size, f, _as_said, span, peak)),
        Stage("refusals", lambda f: on_one_rank(_refuses, f)),
    )
    return Specification(name, f"{name}(p, m) -> Schedule", says, stages)


SPECIFICATIONS = [
    _specification(
        "schedule_gpipe",
        "All forwards, then all backwards: (p-1)/m of bubble, m microbatches alive.",
        lambda p, m: 3 * (m + p - 1),
        lambda p, rank, m: m,
    ),
    _specification(
        "schedule_1f1b",
        "The same bubble, min(p-r, m) microbatches alive.",
        lambda p, m: 3 * (m + p - 1),
        lambda p, rank, m: min(p - rank, m),
    ),
    _specification(
        "schedule_zb_h1",
        "A third of that bubble, no more memory than 1F1B's first rank.",
        lambda p, m: 3 * m + (p - 1) if m >= p else 3 * (m + p - 1),
        lambda p, rank, m: min(p, m),
    ),
]
