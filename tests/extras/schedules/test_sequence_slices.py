"""TeraPipe and Seq1F1B: idle time, memory and order as their docstrings say; and the best cut of a sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules.sequence_slices import seq1f1b, slice_tokens, terapipe
from minipar.schedules import (
    Action,
    Costs,
    Deadlock,
    gpipe,
    make_schedule,
    one_f_one_b,
    simulate,
    to_torch,
    validate,
)
from tests.pipeline.strategies import mutants, schedules, seconds

ranks, microbatches, pieces = st.integers(1, 6), st.integers(1, 8), st.integers(1, 5)


@given(ranks, microbatches, pieces, seconds, seconds, seconds)
def test_slices_divide_the_bubble(p, m, s, f, i, w):
    for schedule in (terapipe(p, m, s), seq1f1b(p, m, s)):
        timeline = simulate(schedule, Costs(f, i, w))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (m * s))
        assert timeline.makespan == (m * s + p - 1) * (f + i + w)


@given(ranks, microbatches, pieces)
def test_units_alive_are_as_many_as_the_docstrings_say(p, m, s):
    assert simulate(terapipe(p, m, s)).peak_live == (m * s,) * p
    assert simulate(seq1f1b(p, m, s)).peak_live == tuple(min(p - r + s - 1, m * s) for r in range(p))


@given(ranks, microbatches)
def test_one_slice_makes_gpipe_and_1f1b(p, m):
    assert terapipe(p, m, 1).actions == gpipe(p, m).actions
    assert seq1f1b(p, m, 1).actions == one_f_one_b(p, m).actions


@given(ranks, microbatches, pieces, seconds, seconds, seconds)
def test_seq1f1b_idles_and_keeps_what_is_printed_of_it(p, more, s, f, i, w):
    """1F1B: (p-1)(F+B) and p M. Seq1F1B: (p-1)(F+B)/s and (s+p-1)/s M, M being what a microbatch's activations take.

    So MindSpeed's documentation of it. Its authors print (P-1+k)/k M for k slices, too, but (P-1) M for 1F1B (issue 4 of
    thunlp/Seq1F1B): that counts the warm-up alone, where the same rule gives P.
    """
    m = p + more  # enough to fill the pipeline
    whole, sliced = (
        simulate(one_f_one_b(p, m), Costs(s * f, s * i, s * w)),
        simulate(seq1f1b(p, m, s), Costs(f, i, w)),
    )
    of_microbatch = s * (f + i + w)
    assert whole.makespan - whole.ideal == pytest.approx((p - 1) * of_microbatch)
    assert sliced.makespan - sliced.ideal == pytest.approx((p - 1) * of_microbatch / s)
    assert max(whole.peak_live) == p
    assert max(sliced.peak_live) / s == (s + p - 1) / s


def test_seq1f1b_on_2_ranks_is_the_published_picture():
    """Microbatches 0 and 1 of two slices each: the later slice's backward first."""
    schedule = seq1f1b(2, 2, 2)
    rows = [" ".join(a.op + schedule.label(a.microbatch) for a in own) for own in schedule.actions]
    assert rows == ["F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0", "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0"]


@pytest.mark.parametrize("op", "FB")
def test_slices_in_the_other_order_are_refused(op):
    """A forward before the earlier slice's lacks keys and values; a backward before the later slice's, their gradients."""
    schedule = terapipe(2, 1, 3)

    def swapped(actions):
        places = [i for i, a in enumerate(actions) if a.op == op]
        order = dict(zip(places, reversed(places)))
        return tuple(actions[order.get(i, i)] for i in range(len(actions)))

    wrong = replace(schedule, actions=tuple(map(swapped, schedule.actions)))
    with pytest.raises(Deadlock, match=rf"rank 1 cannot run {op} .* before {op} .*; cycle: rank"):
        validate(wrong)
    validate(replace(wrong, slices=1, num_microbatches=3))  # as microbatches they would be


@given(mutants(schedules(["terapipe", "seq1f1b"], 3, 3, max_slices=3)))
def test_what_is_valid_runs_the_slices_of_a_sample_in_order(schedule):
    try:
        validate(schedule)
    except ValueError:
        return
    for actions in schedule.actions:
        place = {action: i for i, action in enumerate(actions)}
        for op, stage, unit in actions:
            if unit % schedule.slices:
                earlier = place[Action(op, stage, unit - 1)]
                assert (earlier < place[op, stage, unit]) == (op == "F")


def test_a_unit_that_is_not_there_is_refused():
    schedule = replace(seq1f1b(1, 1, 2), actions=((*seq1f1b(1, 1, 2).actions[0], Action("F", 0, 2)),))
    with pytest.raises(ValueError, match="on rank 0: there are 1 microbatches"):
        validate(schedule)


def test_slices_are_for_the_schedules_that_have_them():
    with pytest.raises(ValueError, match="slices=2 is no argument of schedule='1f1b'; leave it out"):
        make_schedule("1f1b", 2, 2, slices=2)
    with pytest.raises(ValueError, match="slices=0; use a whole number of 1 or more"):
        make_schedule("seq1f1b", 2, 2, slices=0)
    with pytest.raises(ValueError, match="schedule seq1f1b is a SlicedSchedule: torch's runtime"):
        to_torch(seq1f1b(2, 2, 2))


# Where to cut a sample ---------------------------------------------------------------------------------------------


def every_cut(seq_len: int, slices: int, multiple: int):
    places = range(multiple, seq_len, multiple)
    for inner in combinations(places, slices - 1):
        ends = (0, *inner, seq_len)
        yield tuple(b - a for a, b in zip(ends, ends[1:]))


def time_taken(sizes, cost, p: int, m: int) -> float:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    times = [cost(start, size) for start, size in zip(starts, sizes)]
    return m * sum(times) + (p - 1) * max(times)


@given(
    st.data(), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)
)
def test_the_cut_is_the_best_of_all(data, seq_len, slices, p, m, multiple):
    parts = -(-seq_len // multiple)
    table = data.draw(st.lists(st.integers(0, 9), min_size=100, max_size=100))

    def cost(before, tokens):
        return table[10 * before + tokens]

    if slices > parts:
        with pytest.raises(
            ValueError, match=rf"slices={slices} are more than seq_len={seq_len} .* use {parts} or"
        ):
            slice_tokens(seq_len, slices, cost, p, m, multiple)
        return
    got = slice_tokens(seq_len, slices, cost, p, m, multiple)
    cuts = list(every_cut(seq_len, slices, multiple))
    assert got in cuts
    assert time_taken(got, cost, p, m) == min(time_taken(sizes, cost, p, m) for sizes in cuts)


def test_where_tokens_attend_to_those_before_them_later_slices_are_shorter():
    sizes = slice_tokens(64, 4, lambda before, tokens: tokens * (8 + before + (tokens + 1) / 2), p=4)
    assert sum(sizes) == 64
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]
    assert slice_tokens(64, 4, lambda before, tokens: float(tokens), p=4) == (16, 16, 16, 16)


def test_a_slice_also_needs_its_neighbour_of_the_same_sample_on_the_same_stage():
    """Units 6, 7 and 8 are the slices of microbatch 2, on 4 stages."""
    needs = seq1f1b(4, 3, 3).needs
    assert needs(Action("F", 0, 6)) == ()
    assert needs(Action("F", 0, 7)) == (Action("F", 0, 6),)
    assert needs(Action("F", 2, 8)) == (Action("F", 1, 8), Action("F", 2, 7))
    assert needs(Action("B", 3, 8)) == (Action("F", 3, 8),)
    assert needs(Action("B", 3, 7)) == (Action("F", 3, 7), Action("B", 3, 8))
    assert needs(Action("I", 2, 6)) == (Action("F", 2, 6), Action("I", 3, 6), Action("I", 2, 7))
    assert needs(Action("W", 2, 7)) == (Action("I", 2, 7),)
