"""What the search finds: what the paper's found, within the memory it is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.schedules.costs import Costs
from minipar.schedules.search import peak_memory, zb_auto
from minipar.schedules.simulate import simulate
from minipar.schedules.validate import validate
from minipar.schedules.zero_bubble import zb_h1, zb_h2
from tests.pipeline.strategies import costs

# m, F, I, W, comm in ms on 8 ranks, bubble over total of ZB-1p and ZB-2p; (layer width, heads) of the model.
# arXiv:2401.10241, tables 9 and 5; sequences of 1024.
PUBLISHED = [
    (24, (18.522, 18.086, 9.337, 0.601), 0.1585, 0.0433, (2304, 24)),
    (32, (18.513, 18.086, 9.331, 0.626), 0.1242, 0.0039, (2304, 24)),
    (64, (18.546, 18.097, 9.321, 0.762), 0.0674, 0.0026, (2304, 24)),
    (24, (29.718, 29.444, 19.927, 0.527), 0.1323, 0.0029, (4096, 32)),
    (32, (29.802, 29.428, 19.530, 0.577), 0.1045, 0.0022, (4096, 32)),
    (64, (29.935, 29.621, 19.388, 0.535), 0.0554, 0.0010, (4096, 32)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("m", "cost", "at_1p", "at_2p", "model"), PUBLISHED)
def test_the_search_is_as_good_as_the_published_one(m, cost, at_1p, at_2p, model):
    """With the paper's memory: after I, 32sbh of an activation's sb(34h + 5as) are still held."""
    cost, (h, heads) = Costs(*cost), model
    kept = 32 * h / (34 * h + 5 * heads * 1024)
    assert round(simulate(zb_auto(8, m, cost, 8, kept), cost).bubble_over_total, 4) <= at_1p
    assert round(simulate(zb_auto(8, m, cost, 16, kept), cost).bubble_over_total, 4) <= at_2p


@pytest.mark.parametrize(("m", "cost", "at_1p", "_", "__"), PUBLISHED)
def test_the_search_beats_zb_h2_holding_activations_until_w(m, cost, at_1p, _, __):
    cost = Costs(*cost)
    assert round(simulate(zb_auto(8, m, cost, 8), cost).bubble_over_total, 4) == at_1p
    at_2p = simulate(zb_auto(8, m, cost, 16), cost).bubble_over_total
    assert at_2p < simulate(zb_h2(8, m), cost).bubble_over_total


@given(st.data(), st.integers(1, 5), st.integers(1, 10), st.sampled_from([1, 2, 2.5, 4, 9]))
def test_the_search_keeps_its_limit_and_is_valid(data, p, m, limit):
    cost, kept = data.draw(costs(p)), data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    schedule = zb_auto(p, m, cost, limit, kept)
    validate(schedule)
    assert peak_memory(schedule, kept) <= limit + 1e-9
    if kept == 1:
        assert max(simulate(schedule, cost).peak_live) == peak_memory(schedule) <= limit
    if limit >= min(p, m):
        by_hand = simulate(zb_h1(p, m), cost)
        assert simulate(schedule, cost).longest_own_span <= by_hand.longest_own_span


def test_more_memory_never_costs_time():
    cost = Costs(18.5, 18.1, 9.3, 0.6)
    spans = [simulate(zb_auto(4, 12, cost, limit), cost).longest_own_span for limit in range(1, 13)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 2 * spans[-1]


def test_a_rank_waits_where_another_has_the_longest_own_span_anyway():
    """Weight gradients in every gap, or only in gaps of a given length, would take 44."""
    cost = Costs(F=1, I=(1.5, 3, 4), W=(3, 2, 3), comm=1)
    assert simulate(zb_auto(3, 5, cost, 3, 0.5), cost).longest_own_span == 42.5


def test_a_limit_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="memory_limit=0.5 holds no activation; use at least 1, 4 for"):
        zb_auto(4, 8, Costs(), 0.5)
    with pytest.raises(ValueError, match="kept_for_weights=2 is no part"):
        zb_auto(4, 8, Costs(), 4, 2)
