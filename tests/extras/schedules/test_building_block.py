"""V-Min and V-Half: what they promise of memory and idle time, and the pattern that they repeat."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules.building_block import INTERVAL, Pace, building_block, v_half, v_min
from minipar.schedules import Costs, Schedule, one_f_one_b, simulate, zb_v

ranks, more = st.integers(2, 12), st.integers(0, 12)


def idle(schedule: Schedule) -> float:
    timeline = simulate(schedule)
    return timeline.longest_own_span - timeline.ideal


def pattern(p: int, pace: Pace) -> list[dict]:
    return building_block(p, pace)


@given(ranks, more)
def test_v_min_idles_as_its_docstring_says(p, more):
    assert idle(v_min(p, 2 * p + more)) == 4 * (p - 1) + (1 if p % 3 == 0 else -1)


@given(ranks, more)
def test_v_half_idles_at_most_as_long_as_its_docstring_says(p, more):
    assert idle(v_half(p, 2 * p + more)) <= 3.5 * (p - 1) + 0.5


@given(ranks, more)
def test_memory_is_a_third_and_a_half_of_1f1bs_and_a_few_chunks(p, more):
    """In chunks, of which two are a stage of 1F1B."""
    m = 2 * p + more
    whole = 2 * max(simulate(one_f_one_b(p, m)).peak_live)
    assert max(simulate(v_min(p, m)).peak_live) <= whole / 3 + 8 / 3
    assert max(simulate(v_half(p, m)).peak_live) <= whole / 2 + 3
    assert max(simulate(zb_v(p, m)).peak_live) == whole


@pytest.mark.parametrize("p", [8, 16])
def test_less_memory_costs_more_time(p):
    by_time = [zb_v(p, 4 * p), v_half(p, 4 * p), v_min(p, 4 * p)]
    assert [idle(s) for s in by_time] == sorted(idle(s) for s in by_time)
    peaks = [max(simulate(s).peak_live) for s in by_time]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


@given(ranks, st.sampled_from([Pace(1, 1, 1, 1), Pace(1, 2, 1, 2)]))
def test_a_rank_is_never_asked_for_two_actions_at_once_when_the_block_is_repeated(p, pace):
    for starts in pattern(p, pace):
        assert sorted(start % INTERVAL for start in starts.values()) == list(range(INTERVAL))


@given(ranks, more)
def test_without_squeezing_a_result_is_used_no_sooner_than_it_is_there(p, more):
    """Equal costs: no action starts later than in the repeated block, which fixes the middle's pace: no idle time there."""
    m = 2 * p + more
    for schedule in (v_min(p, m), v_half(p, m)):
        steady = simulate(schedule).makespan - simulate(first_less(schedule)).makespan
        assert steady == INTERVAL


def first_less(schedule: Schedule) -> Schedule:
    """The same for one microbatch less."""
    make = {"v-min": v_min, "v-half": v_half}[schedule.name]
    return make(schedule.num_ranks, schedule.num_microbatches - 1)


def test_where_a_weight_gradient_is_cheap_ranks_wait():
    schedule, costs = v_min(4, 16), Costs(1, 1, 0.5)
    timeline = simulate(schedule, costs)
    assert timeline.longest_own_span - timeline.ideal > 11
