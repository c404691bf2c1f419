"""Hanayo's waves: placement, messages and memory as its docstring says."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules.waves import hanayo
from minipar.schedules import interleaved, lower, one_f_one_b, simulate
from minipar.schedules.lower import Send

ranks, chunks = st.integers(2, 6), st.sampled_from([2, 4])


def num_messages(schedule) -> int:
    return sum(isinstance(instruction, Send) for program in lower(schedule) for instruction in program)


@given(ranks, chunks, st.integers(1, 12))
def test_turns_need_no_message(p, v, m):
    assert num_messages(hanayo(p, m, v)) == 2 * m * v * (p - 1)
    assert num_messages(interleaved(p, m, v)) == 2 * m * (v * p - 1)


@given(ranks, chunks, st.integers(1, 24))
def test_at_most_2p_microbatches_are_under_way(p, v, m):
    assert max(simulate(hanayo(p, m, v)).peak_live) <= min(m, 2 * p) * v
    assert most_under_way(p, m, v) <= min(m, 2 * p)


def most_under_way(p: int, m: int, v: int) -> int:
    """Microbatches that have begun on stage 0, and whose backward has not ended there."""
    change = {"F": 1, "B": -1}
    return max(accumulate(change[op] for op, stage, _ in hanayo(p, m, v).actions[0] if stage == 0))


def test_2p_microbatches_are_under_way_where_there_are_enough():
    assert most_under_way(4, 16, 4) == 8


@given(ranks, chunks)
def test_with_p_microbatches_it_idles_as_its_docstring_says(p, v):
    timeline = simulate(hanayo(p, p, v))
    assert timeline.longest_own_span - timeline.ideal <= 4 * p
    whole = simulate(one_f_one_b(p, p))
    assert (whole.longest_own_span - whole.ideal) * v == 3 * v * (p - 1)


@given(ranks, st.sampled_from([2, 4, 8]))
def test_it_idles_as_published_and_that_is_less_of_the_step(p, v):
    """Course notes quote the paper's ratio for p microbatches and W = v/2 waves as (2P-2) / (3PW + P-1).

    3PW is the work, in the time of two chunks' F, and 2P-2 what a rank idles, with several waves one chunk's F more. The
    ratio's total has P-1 of it; with all of it the share of the step is (2P-2) / (3PW + 2P-2).
    """
    waves, timeline = v // 2, simulate(hanayo(p, p, v))
    work, idle = timeline.ideal / 2, (timeline.longest_own_span - timeline.ideal) / 2
    assert work == 3 * p * waves
    assert idle in ((2 * p - 2,) if waves == 1 else (2 * p - 2, 2 * p - 1.5))
    assert timeline.bubble_over_total == pytest.approx(idle / (work + idle))
    assert waves > 1 or timeline.bubble_over_total < (2 * p - 2) / (work + p - 1)


@given(ranks, chunks)
def test_with_many_microbatches_interleaved_idles_less(p, v):
    def idle(schedule):
        timeline = simulate(schedule)
        return timeline.longest_own_span - timeline.ideal

    assert idle(hanayo(p, 4 * p, v)) > idle(interleaved(p, 4 * p, v))


def test_an_odd_number_of_chunks_is_no_wave():
    with pytest.raises(
        ValueError, match="3 chunks a rank: a wave goes down and up; use an even number, such as 4"
    ):
        hanayo(4, 8, 3)
