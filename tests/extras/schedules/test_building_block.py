"""V-Min: what it promises of memory and idle time, and the pattern that it repeats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.schedules.building_block import INTERVAL, building_block, v_min
from minipar.schedules import Costs, one_f_one_b, simulate, zb_v

ranks, more = st.integers(2, 12), st.integers(0, 12)


@given(ranks, more)
def test_v_min_idles_as_its_docstring_says(p, more):
    timeline = simulate(v_min(p, 2 * p + more))
    assert timeline.longest_own_span - timeline.ideal == 4 * (p - 1) + (1 if p % 3 == 0 else -1)


@given(ranks, more)
def test_memory_is_a_third_of_1f1bs_and_a_few_chunks(p, more):
    """In chunks, of which two are a stage of 1F1B."""
    m = 2 * p + more
    whole = 2 * max(simulate(one_f_one_b(p, m)).peak_live)
    assert max(simulate(v_min(p, m)).peak_live) <= whole / 3 + 8 / 3
    assert max(simulate(zb_v(p, m)).peak_live) == whole


@given(ranks)
def test_a_rank_never_has_two_actions_at_once_in_the_repeated_block(p):
    for rank in range(p):
        starts = building_block(p, rank).values()
        assert sorted(start % INTERVAL for start in starts) == list(range(INTERVAL))


@given(ranks, more)
def test_ranks_do_not_idle_in_the_middle_if_costs_are_equal(p, more):
    """One more microbatch takes the time of its work."""
    m = 2 * p + more
    assert simulate(v_min(p, m)).makespan - simulate(v_min(p, m - 1)).makespan == INTERVAL


def test_where_a_weight_gradient_is_cheap_ranks_wait():
    timeline = simulate(v_min(4, 16), Costs(1, 1, 0.5))
    assert timeline.longest_own_span - timeline.ideal > 11
