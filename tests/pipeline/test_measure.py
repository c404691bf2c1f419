"""Runs as timelines: stages that sleep take the time they cost, and a timeline gives its costs back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.pipeline import Costs, dualpipe_v, measured, measured_costs, seq1f1b, simulate, zb_h1
from minipar.pipeline.emulate import emulate
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


@pytest.mark.parametrize("schedule", [zb_h1(3, 3), dualpipe_v(2, 4), seq1f1b(2, 2, 3)], ids=lambda s: s.name)
def test_an_emulated_action_takes_at_least_what_it_costs(schedule):
    asked = Costs(F=0.002, I=0.004, W=0.003)
    spans = minipar.run(emulate, schedule, asked, world_size=schedule.num_ranks, timeout_s=10)
    timeline = measured(schedule, spans)
    table = asked.table(schedule.num_stages)
    for (op, stage, _), (start, end) in timeline.spans.items():
        assert end - start >= table[op][stage] - 1e-9
    assert min(start for start, _ in timeline.spans.values()) == 0
    assert timeline.makespan >= simulate(schedule, asked).makespan
