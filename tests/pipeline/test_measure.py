"""Runs as timelines: stages that sleep take the time they cost, and a timeline gives its costs back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.pipeline import measured_costs
from minipar.pipeline.emulate import emulate
from minipar.schedules.costs import Costs
from minipar.schedules.simulate import simulate
from minipar.schedules.v_shaped import dualpipe_v
from minipar.schedules.zero_bubble import zb_h1
from tests.pipeline.programs import check_emulated
from tests.pipeline.strategies import costs, schedules


@given(st.data(), schedules(max_ranks=4, max_microbatches=6))
def test_the_costs_of_a_timeline_are_those_it_was_simulated_with(data, schedule):
    given_costs = data.draw(costs(schedule.num_stages))
    spans = simulate(schedule, given_costs).spans
    want, got = (c.table(schedule.num_stages) for c in (given_costs, measured_costs(schedule, spans)))
    split = {action.stage for action in spans if action.op == "W"}
    for s in range(schedule.num_stages):
        assert got["F"][s] == pytest.approx(want["F"][s])
        assert got["B"][s] == pytest.approx(want["B"][s])
        assert got["W"][s] == pytest.approx(want["W"][s] if s in split else 0)


@pytest.mark.parametrize("schedule", [zb_h1(3, 3), dualpipe_v(2, 4)], ids=lambda s: s.name)
def test_an_emulated_action_takes_at_least_what_it_costs(schedule):
    check_emulated(schedule)


def test_the_ranks_of_an_emulation_begin_each_step_together():
    def barriers(world):
        emulate(world, zb_h1(2, 2), Costs(0, 0, 0), steps=3)
        return world.traffic.by_kind["barrier"]

    assert minipar.run(barriers, world_size=2) == [3, 3]
