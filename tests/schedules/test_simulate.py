"""The simulator against closed forms, published figures, and its own equations."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.schedules.costs import Costs
from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.schedule import Schedule, output_key
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.zero_bubble import zb_h1, zb_h2
from tests.pipeline.strategies import costs, schedules, seconds

ranks, microbatches, chunks = st.integers(1, 8), st.integers(1, 24), st.integers(2, 4)

# m, then F, I, W and comm in ms on 8 ranks, then bubble over total: 1F1B, interleaved with v, ZB-H1, ZB-H2.
# arXiv:2401.10241, tables 9 and 5.
PUBLISHED = [
    (24, (18.522, 18.086, 9.337, 0.601), 0.2431, (0.1055, 3), 0.1585, 0.1083),
    (32, (18.513, 18.086, 9.331, 0.626), 0.1985, (0.0818, 3), 0.1242, 0.0837),
    (64, (18.546, 18.097, 9.321, 0.762), 0.1240, (0.0443, 3), 0.0674, 0.0444),
    (24, (29.718, 29.444, 19.927, 0.527), 0.2347, (0.0808, 4), 0.1323, 0.0698),
    (32, (29.802, 29.428, 19.530, 0.577), 0.1898, (0.0628, 4), 0.1045, 0.0559),
    (64, (29.935, 29.621, 19.388, 0.535), 0.1091, (0.0320, 4), 0.0554, 0.0294),
]


@pytest.mark.parametrize(("m", "cost", "of_1f1b", "_", "of_zb_h1", "of_zb_h2"), PUBLISHED)
def test_bubble_rates_are_the_published_ones_to_four_decimals(m, cost, of_1f1b, _, of_zb_h1, of_zb_h2):
    got = [simulate(make(8, m), Costs(*cost)).bubble_over_total for make in (one_f_one_b, zb_h1, zb_h2)]
    assert [round(rate, 4) for rate in got] == [of_1f1b, of_zb_h1, of_zb_h2]


@pytest.mark.parametrize(("m", "cost", "_1", "published", "_2", "_3"), PUBLISHED)
def test_interleaved_bubbles_are_as_published_less_a_hop_a_rank(m, cost, published, _1, _2, _3):
    """The published times lack 8 * comm of what its order and latencies give; why is not known."""
    rate, v = published
    *work, comm = cost
    timeline = simulate(interleaved(8, m, v), Costs(*(seconds / v for seconds in work), comm))
    span = timeline.longest_own_span - 8 * comm
    assert round(1 - timeline.ideal / span, 4) == rate


@given(st.data(), schedules(max_ranks=4, max_microbatches=8, max_slices=3))
def test_actions_start_exactly_as_early_as_the_rule_allows(data, schedule):
    """The defining equations, checked on the result: their least solution is unique."""
    timeline = simulate(schedule, cost := data.draw(costs(schedule.num_stages)))
    ends = {output_key(action): end for action, (_, end) in timeline.spans.items()}
    table = cost.table(schedule.num_stages)
    assert set(timeline.spans) == {action for actions in schedule.actions for action in actions}
    for rank, actions in enumerate(schedule.actions):
        free = 0.0
        for action in actions:
            start, end = timeline.spans[action]
            arrivals = [
                ends[output_key(need)] + (cost.comm if schedule.stage_rank[need.stage] != rank else 0.0)
                for need in schedule.needs(action)
            ]
            assert start == max([free, *arrivals])
            assert end == start + table[action.op][action.stage]
            free = end


@given(ranks, microbatches, seconds, seconds, seconds)
def test_gpipe_and_1f1b_take_the_same_time_and_bubble(p, m, f, i, w):
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        timeline = simulate(schedule, Costs(f, i, w))
        assert timeline.makespan == (m + p - 1) * (f + i + w)
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
        assert timeline.bubble_over_total == pytest.approx((p - 1) / (m + p - 1))


@given(ranks, st.integers(1, 4), chunks, seconds, seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(p, groups, v, f, b):
    m = p * groups
    for schedule in (interleaved(p, m, v), breadth_first(p, m, v)):
        timeline = simulate(schedule, Costs(f, b / 2, b / 2))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m))
        assert timeline.bubble_over_total == pytest.approx((p - 1) / (v * m + p - 1))


@given(ranks, st.integers(0, 12), seconds)
def test_zero_bubble_schedules_idle_as_published_at_equal_costs(p, more, t):
    def idle(schedule):
        timeline = simulate(schedule, Costs(t, t, t))
        return timeline.longest_own_span - timeline.ideal

    m = 2 * p + more
    assert idle(zb_h1(p, m)) == pytest.approx((p - 1) * t)  # a third of 1F1B's (p-1) * 3t
    assert idle(dualpipe_v(p, m)) == pytest.approx((p - 1) * t)
    assert idle(zb_h2(p, m)) == pytest.approx(0)
    assert idle(zb_v(p, m)) == pytest.approx(0)


cost = st.floats(0, 4).map(lambda c: round(c, 2))


@given(ranks, microbatches, cost, cost, cost)
def test_zb_h1_idle_time_is_its_documented_formula_at_any_costs(p, m, f, i, w):
    timeline = simulate(zb_h1(p, m), Costs(f, i, w))
    idle = (p - 1) * (f + i) - (min(p, m) - 1) * min(f, w)
    assert timeline.longest_own_span - timeline.ideal == pytest.approx(idle, abs=1e-9)


@given(ranks, microbatches, cost, cost, st.floats(0, 1))
def test_zb_h2_idles_as_its_docstring_says_while_w_is_short(p, m, f, i, share):
    w = share * min(f, (f + i) / 2)
    timeline = simulate(zb_h2(p, m), Costs(f, i, w))
    idle = (p - 1) * (f + i) - (min(2 * p - 1, m) - 1) * w
    assert timeline.longest_own_span - timeline.ideal == pytest.approx(idle, abs=1e-9)


@given(ranks, microbatches, chunks)
def test_interleaved_is_bounded_by_the_next_multiple_of_the_ranks(p, m, v):
    """Where p does not divide m: its time, and what it keeps alive."""
    some, whole = simulate(interleaved(p, m, v)), simulate(interleaved(p, -(-m // p) * p, v))
    assert some.makespan <= whole.makespan
    for r, peak in enumerate(some.peak_live):
        most = min(2 * (p - r - 1) + (v - 1) * p + 1, m * v)
        assert peak <= most
        assert m % p or peak == most


@given(ranks, microbatches, chunks)
def test_live_activations_peak_as_published(p, m, v):
    assert simulate(gpipe(p, m)).peak_live == (m,) * p
    assert simulate(breadth_first(p, m, v)).peak_live == (m * v,) * p
    assert simulate(one_f_one_b(p, m)).peak_live == tuple(min(p - r, m) for r in range(p))
    assert simulate(zb_h1(p, m)).peak_live == (min(p, m),) * p
    assert simulate(zb_h2(p, m)).peak_live == (min(2 * p - 1, m),) * p
    assert simulate(zb_v(p, 2 * p + m)).peak_live == (2 * p,) * p
    assert max(simulate(dualpipe_v(p, 2 * p + m)).peak_live) <= 2 * p + 1


@given(st.data(), schedules(max_ranks=4, max_microbatches=6, max_slices=3))
def test_the_critical_path_is_a_chain_as_long_as_the_makespan(data, schedule):
    timeline = simulate(schedule, cost := data.draw(costs(schedule.num_stages)))
    path = timeline.critical_path
    rank = [schedule.stage_rank[action.stage] for action in path]
    hops = sum(cost.comm for a, b in zip(rank, rank[1:]) if a != b)
    assert hops + sum(end - start for start, end in map(timeline.spans.get, path)) == timeline.makespan
    assert timeline.spans[path[0]][0] == 0


def test_a_latency_delays_but_occupies_nobody():
    timeline = simulate(gpipe(2, 4), Costs(1, 0.5, 0.5, comm=10))
    assert timeline.busy == (8, 8)
    assert timeline.makespan == 1 + 10 + 4 + 1 + 10 + 4


@given(schedules(max_slices=3))
def test_an_action_is_looked_at_once_and_once_more_a_wait(schedule):
    """So a simulation takes time in proportion to the actions, whatever their order."""
    asked = Counter()

    def counted(self, action):
        asked[action] += 1
        return rule(self, action)

    rule = type(schedule).needs
    with mock.patch.object(type(schedule), "needs", counted):
        simulate(schedule)
    for action, times in asked.items():
        assert times <= 1 + len(schedule.needs(action))


def test_default_backwards_cost_two_forwards_and_sends_are_free():
    assert Costs().table(2) == {"F": (1, 1), "B": (2, 2), "I": (1, 1), "W": (1, 1)}
    assert Costs().hops(range(2)) == [0, 0]


def test_a_timeline_without_actions_takes_no_time():
    empty = Timeline(Schedule(((),), (0,), 1, "empty"), {})
    assert (empty.makespan, empty.longest_own_span, empty.busy, empty.peak_live) == (0, 0, (0,), (0,))
    assert empty.bubble_over_total == empty.bubble_over_ideal == 0


def test_a_measured_timeline_may_begin_at_any_time():
    at_0 = simulate(one_f_one_b(2, 3))
    later = Timeline(at_0.schedule, {a: (start + 5, end + 5) for a, (start, end) in at_0.spans.items()})
    assert later.makespan == at_0.makespan == 12


def test_costs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="F has 3 entries for 4 stages"):
        simulate(gpipe(4, 2), Costs(F=(1, 1, 1)))
    with pytest.raises(ValueError, match="W=-1 is negative"):
        simulate(gpipe(4, 2), Costs(W=-1))
    with pytest.raises(ValueError, match="comm=nan is no number to compute with"):
        simulate(gpipe(4, 2), Costs(comm=float("nan")))
