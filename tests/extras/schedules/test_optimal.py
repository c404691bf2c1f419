"""The exact search: equal to trying every order, never worse than a generator, within its memory."""

from __future__ import annotations

import sys
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules import optimal
from minipar.schedules import Action, Costs, Deadlock, Schedule, simulate, validate, zb_auto, zb_h1, zb_v
from tests.examples import examples

pytest.importorskip("ortools", reason="the exact search needs OR-tools: pip install 'minipar[optimal]'")

# Whole numbers: the solver computes with integers, and so equal spans are equal.
units = st.integers(1, 4)


def orders_of_a_rank(rank: int, m: int):
    """Every order of one rank's F, I, W, each in ascending order of microbatches."""
    places = range(3 * m)
    for f in combinations(places, m):
        rest = [place for place in places if place not in f]
        for i in combinations(rest, m):
            order = {place: Action("F", rank, k) for k, place in enumerate(f)}
            order |= {place: Action("I", rank, k) for k, place in enumerate(i)}
            w = [place for place in rest if place not in i]
            if all(a < b < c for a, b, c in zip(f, i, w)):
                order |= {place: Action("W", rank, k) for k, place in enumerate(w)}
                yield tuple(order[place] for place in places)


def shortest_of_all(p: int, m: int, costs: Costs, limit: int) -> float:
    best = float("inf")
    for actions in product(*(list(orders_of_a_rank(rank, m)) for rank in range(p))):
        try:
            timeline = simulate(Schedule(actions, tuple(range(p)), m), costs)
        except Deadlock:
            continue
        if max(timeline.peak_live) <= limit:
            best = min(best, timeline.longest_own_span)
    return best


@examples(6)
@given(
    st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]),
    units,
    units,
    units,
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_it_is_the_best_of_all_orders(size, f, i, w, comm, limit):
    costs = Costs(f, i, w, comm)
    found = optimal(*size, costs, limit)
    assert found.proved
    assert found.span == shortest_of_all(*size, costs, limit)


@examples(6)
@given(st.integers(1, 3), st.integers(1, 4), units, units, units, st.integers(1, 4))
def test_the_schedule_keeps_its_limit_and_no_generator_beats_it(p, m, f, i, w, limit):
    costs = Costs(f, i, w)
    found = optimal(p, m, costs, limit, seconds=10)
    validate(found.schedule)
    assert max(simulate(found.schedule, costs).peak_live) <= limit
    assert found.bound <= found.span
    for schedule in (zb_auto(p, m, costs, limit), zb_h1(p, m)):
        timeline = simulate(schedule, costs)
        if max(timeline.peak_live) <= limit:
            assert found.span <= timeline.longest_own_span


def test_it_keeps_the_placement_of_the_schedule_it_starts_from():
    start = zb_v(2, 4)
    found = optimal(2, 4, memory_limit=4, start=start)
    validate(found.schedule)
    assert found.schedule.stage_rank == start.stage_rank
    assert found.span <= simulate(start).longest_own_span


def test_costs_may_be_fractions():
    assert optimal(2, 2, Costs(0.5, 0.25, 0.25)).span == pytest.approx(optimal(2, 2, Costs(2, 1, 1)).span / 4)


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match="needs OR-tools; pip install"):
        optimal(2, 2)


def test_a_limit_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="memory_limit=0; use a whole number of 1 or more"):
        optimal(2, 2, memory_limit=0)
