"""Specifications of pipeline schedules as data: complete, acyclic, with the time and memory stated in the papers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from minipar.schedules import Costs, Schedule, simulate, validate
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Specification, Stage, every
from minipar.spec.words import first

Span = Callable[[int, int], float]  # (p, m) -> slots
Peak = Callable[[int, int, int], int]  # (p, rank, m) -> live microbatches

SIZES = [*((p, m) for p in (1, 2, 3, 4) for m in (1, 2, 4, 7)), (5, 9), (8, 5), (6, 33)]


def _valid(make: Implementation, p: int, m: int) -> str | None:
    try:
        schedule = make(p, m)
        if not isinstance(schedule, Schedule):
            return f"with p={p}, m={m} it returned a {type(schedule).__name__}; return a Schedule"
        validate(schedule)
        if (asked := (p, m)) != (has := (len(schedule.actions), schedule.num_microbatches)):
            return (
                f"with p={p}, m={m} it is a schedule of {has[0]} ranks and {has[1]} microbatches, not {asked}"
            )
    except (ValueError, TypeError, IndexError, KeyError) as error:
        return f"with p={p}, m={m}: {error}"
    return None


def _as_said(make: Implementation, p: int, m: int, span: Span, peak: Peak) -> str | None:
    timeline = simulate(make(p, m), Costs(F=1, I=1, W=1))
    if timeline.longest_own_span > span(p, m) + 1e-9:
        times = "F=I=W=1" if any(action.op == "W" for action in timeline.spans) else "F=1, B=2"
        return f"with p={p}, m={m} and {times} a rank takes {timeline.longest_own_span:g}; this order takes {span(p, m):g}"
    for rank, live in enumerate(timeline.peak_live):
        if live > peak(p, rank, m):
            return f"with p={p}, m={m} rank {rank} keeps {live} microbatches alive; this order needs {peak(p, rank, m)}"
    return None


def _at_every_size(make: Implementation, test: Body) -> str | None:
    return first(test(make, p=p, m=m) for p, m in SIZES)


def _refuses(make: Implementation) -> str | None:
    for p, m in ((0, 1), (1, 0), (2, -1)):
        try:
            make(p, m)
        except ValueError:
            continue
        return f"with p={p}, m={m} it returned a schedule; raise a ValueError that names the argument"
    return None


def _specification(name: str, says: str, span: Span, peak: Peak) -> Specification:
    as_said = partial(_as_said, span=span, peak=peak)
    stages = (
        Stage("runs", partial(_valid, p=1, m=1), ()),
        Stage("small", every(partial(_valid, p=2, m=3), partial(as_said, p=2, m=3)), ()),
        Stage("drawn", partial(_at_every_size, test=_valid), ()),
        Stage("memory", partial(_at_every_size, test=as_said), ()),
        Stage("refusals", _refuses, ()),
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
