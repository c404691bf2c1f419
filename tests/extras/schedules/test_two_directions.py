"""Chimera, DualPipe and other Vs unfolded: idle time, memory and order as published; and what `validate` refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.config.train_config import TrainConfig
from minipar.extras.schedules.building_block import v_min
from minipar.extras.schedules.two_directions import chimera, dualpipe, unfolded
from minipar.pipeline.emulate import emulate
from minipar.schedules import (
    Action,
    Costs,
    dualpipe_v,
    interleaved,
    one_f_one_b,
    simulate,
    to_torch,
    validate,
    zb_v,
)
from tests.pipeline.programs import refusal
from tests.pipeline.strategies import costs, schedules

EVEN_BACKWARD, WHOLE_BACKWARD = Costs(F=1.0, I=0.5, W=0.5), Costs()  # B = F and B = 2F
halves = st.integers(1, 6)
vs = schedules(["zb-v", "dualpipe-v", "v-min"], max_ranks=4, max_microbatches=8)


@given(halves, st.integers(1, 4))
def test_chimera_has_the_papers_bubble_and_memory(half, rounds):
    p, m = 2 * half, 2 * half * rounds
    timeline = simulate(chimera(p, m), EVEN_BACKWARD)
    assert timeline.longest_own_span - timeline.ideal == p - 2
    assert timeline.bubble_over_total == pytest.approx((p - 2) / (2 * m + p - 2))
    longer = simulate(chimera(p, m), WHOLE_BACKWARD)
    assert longer.longest_own_span - longer.ideal == (p - 2) * (1 + rounds)
    if rounds == 1:
        assert longer.bubble_over_total == pytest.approx((p - 2) / (1.5 * m + p - 2) if p > 2 else 0)
    up = tuple(half + 1 + r for r in range(half))
    assert timeline.peak_live == longer.peak_live == (*up, *reversed(up))


@given(halves, st.integers(0, 4))
def test_dualpipe_has_the_published_bubble_and_memory(half, more):
    """(p/2 - 1)(F&B + B - 3W) with F&B = F + B, where I = F = W: a pair of actions does not overlap here."""
    p, m = 2 * half, 4 * half + 2 * more
    timeline = simulate(dualpipe(p, m))
    assert timeline.longest_own_span - timeline.ideal == (half - 1) * (1 + 2 + 2 - 3 - 1)
    assert set(timeline.peak_live) == {p + 1}


def test_chimera_on_4_ranks_is_the_published_picture():
    """Microbatches 0 and 2 go down, 1 and 3 up (the paper numbers them 0, 1 and 2, 3)."""
    rows = [" ".join(f"{a.op}{a.microbatch}" for a in own) for own in chimera(4, 4).actions]
    assert rows == [
        "F0 F2 F1 B1 F3 B3 B0 B2",
        "F0 F1 F2 F3 B1 B0 B3 B2",
        "F1 F0 F3 F2 B0 B1 B2 B3",
        "F1 F3 F0 B0 F2 B2 B1 B3",
    ]


@given(halves, st.integers(1, 12))
def test_no_two_actions_of_chimera_want_one_slot(half, rounds):
    """Where F = B = 1, its order is that of the slots of two 1F1B pipelines, which then run side by side."""
    p, m = 2 * half, 2 * half * rounds
    spans = simulate(chimera(p, m), EVEN_BACKWARD).spans
    alone = simulate(one_f_one_b(p, half), EVEN_BACKWARD).spans
    for k in range(half):
        assert spans[Action("B", 0, 2 * k)] == alone[Action("B", 0, k)]
        assert spans[Action("B", p, 2 * k + 1)] == alone[Action("B", 0, k)]


@given(vs, st.data())
def test_an_unfolded_v_takes_as_long_and_keeps_as_much_as_the_v(folded, data):
    """Two pipelines of the V on half of the ranks each (dp=2) would do the same work, with as many parameters a rank."""
    wide = unfolded(folded)
    validate(wide)
    per_stage = data.draw(costs(folded.num_stages))
    f, i, w = (per_stage.table(folded.num_stages)[op] for op in "FIW")
    ours = simulate(wide, Costs(f * 2, i * 2, w * 2))
    v = simulate(folded, Costs(f, i, w))
    assert ours.makespan == v.makespan
    assert ours.peak_live == (*v.peak_live, *reversed(v.peak_live))
    assert wide.num_ranks == 2 * folded.num_ranks
    assert wide.num_microbatches == 2 * folded.num_microbatches


@given(schedules(["chimera", "dualpipe"], max_ranks=8, max_microbatches=16))
def test_directions_halve_the_microbatches_in_mirrored_order(schedule):
    validate(schedule)
    S = schedule.num_stages // 2
    down = {a.microbatch for own in schedule.actions for a in own if a.stage < S}
    up = {a.microbatch for own in schedule.actions for a in own if a.stage >= S}
    assert down == set(range(0, schedule.num_microbatches, 2))
    assert up == set(range(1, schedule.num_microbatches, 2))
    for own, mirror in zip(schedule.actions, reversed(schedule.actions)):
        assert [(a.op, a.stage % S) for a in own] == [(a.op, a.stage % S) for a in mirror]


def test_a_microbatch_that_is_left_out_is_refused():
    schedule = chimera(4, 4)
    kept = tuple(tuple(a for a in own if a.microbatch != 3) for own in schedule.actions)
    with pytest.raises(ValueError, match="F of microbatch 3 on stage 4 occurs 0 times"):
        validate(replace(schedule, actions=kept))


def test_two_directions_are_drawn_and_no_pipeline_runs_them():
    """Neither a run nor stages that sleep."""
    with pytest.raises(ValueError, match="schedule='chimera' is unknown"):
        TrainConfig(pp=2, schedule="chimera")
    said, *_ = refusal(
        lambda world: minipar.Pipeline([nn.Identity()] * 2, world, chimera(2, 2)), world_size=2
    )
    assert "schedule chimera is a TwoDirections, and this pipeline runs a Schedule" in said
    said, *_ = refusal(lambda world: emulate(world, dualpipe(2, 2), Costs()), world_size=2)
    assert "schedule dualpipe is only drawn" in said


@pytest.mark.parametrize("generator", [chimera, dualpipe])
def test_odd_sizes_are_refused_with_an_even_one(generator):
    with pytest.raises(ValueError, match="p=3 ranks in two directions: .* use an even number, such as 4"):
        generator(3, 4)
    with pytest.raises(ValueError, match="m=5 microbatches in two directions: .* such as 6"):
        generator(4, 5)


def test_only_a_v_can_be_unfolded():
    validate(unfolded(v_min(2, 4)))
    for schedule in (one_f_one_b(4, 4), interleaved(2, 4, 4)):
        with pytest.raises(ValueError, match=f"schedule {schedule.name} places .* as a V, such as"):
            unfolded(schedule)
    with pytest.raises(ValueError, match="schedule chimera is a TwoDirections; only a plain V"):
        unfolded(chimera(2, 2))
    assert unfolded(zb_v(2, 3), "mine").name == "mine"
    assert dualpipe(4, 8) == unfolded(dualpipe_v(2, 4), "dualpipe")


def test_torch_has_one_copy_of_the_model():
    with pytest.raises(ValueError, match="schedule dualpipe is a TwoDirections: torch's runtime runs"):
        to_torch(dualpipe(2, 2))
