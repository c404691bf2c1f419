"""What every generator promises, and what it refuses."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.schedules.gpipe import breadth_first, gpipe
from minipar.schedules.one_f_one_b import interleaved, one_f_one_b
from minipar.schedules.registry import chunks_per_rank, make_schedule
from minipar.schedules.schedule import Action, needs
from minipar.schedules.simulate import simulate
from minipar.schedules.v_shaped import dualpipe_v, zb_v
from minipar.schedules.validate import validate
from tests.pipeline.strategies import schedules
from tests.schedules.families import CHOICES, LOOPED


@given(schedules(max_slices=4))
def test_every_generated_schedule_is_valid(schedule):
    validate(schedule)


@given(schedules(max_slices=4))
def test_stages_run_each_kind_in_ascending_microbatch_order(schedule):
    """Of a microbatch's slices, forwards in ascending order, backwards in descending. Of two copies, each has its own."""
    order = defaultdict(list)
    for actions in schedule.actions:
        for op, stage, k in actions:
            for half in "IW" if op == "B" else op:
                order[half, stage].append(k)
    s = getattr(schedule, "slices", 1)
    for (op, stage), numbers in order.items():
        own = sorted({k // s for at, k in schedule.work() if at == stage})
        assert numbers == [k * s + n for k in own for n in (range(s) if op == "F" else reversed(range(s)))]
    assert len(order) == 3 * schedule.num_stages


def test_needs_is_the_whole_dependency_rule():
    assert needs(Action("F", 0, 7), 4) == ()
    assert needs(Action("F", 2, 7), 4) == (Action("F", 1, 7),)
    assert needs(Action("B", 3, 7), 4) == (Action("F", 3, 7),)
    assert needs(Action("B", 2, 7), 4) == (Action("F", 2, 7), Action("B", 3, 7))
    assert needs(Action("I", 2, 7), 4) == (Action("F", 2, 7), Action("I", 3, 7))
    assert needs(Action("W", 2, 7), 4) == (Action("I", 2, 7),)


def test_1f1b_on_3_ranks_is_the_published_picture():
    rows = [" ".join(f"{op}{k}" for op, _, k in actions) for actions in one_f_one_b(3, 4).actions]
    assert rows == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


@pytest.mark.parametrize("v", [1, 2, 3])
def test_breadth_first_visits_a_ranks_stages_twice_but_the_last_once(v):
    schedule = breadth_first(2, 3, v)
    for rank in range(2):
        assert [visit[0].stage for visit in schedule.visits(rank)] == [
            *schedule.stages_of(rank),
            *schedule.stages_of(rank)[-2::-1],
        ]
        assert len(schedule.visits(rank)) == 2 * v - 1


def test_a_weight_gradient_belongs_to_no_visit():
    """Rank 0's visits of stages 0 and 3: a W of the other stage does not divide one."""
    visits = zb_v(2, 2).visits(0)
    assert {action.op for visit in visits for action in visit} == {"F", "I"}
    assert all(before[0].stage != after[0].stage for before, after in pairwise(visits))


def test_interleaved_order_is_the_published_picture():
    """2 ranks, 2 chunks, 4 microbatches: two of chunk 0, two of chunk 1, and so on; stages 0, 2 on rank 0."""
    first = " ".join(f"{op}{stage}.{k}" for op, stage, k in interleaved(2, 4, 2).actions[0])
    assert first == "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"


@given(st.integers(1, 4), st.integers(1, 4))
def test_looped_placements_wrap_and_v_placements_turn_at_the_end(p, v):
    assert interleaved(p, 3, v).stage_rank == breadth_first(p, 3, v).stage_rank == (*range(p),) * v
    assert zb_v(p, 3).stage_rank == dualpipe_v(p, 3).stage_rank == (*range(p), *range(p - 1, -1, -1))


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_chunk_makes_interleaved_1f1b_and_breadth_first_gpipe(p, m):
    assert interleaved(p, m, 1).actions == one_f_one_b(p, m).actions
    assert breadth_first(p, m, 1).actions == gpipe(p, m).actions


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 3))
def test_interleaved_takes_no_longer_than_its_next_whole_group(p, m, v):
    whole = interleaved(p, -(-m // p) * p, v)
    assert simulate(interleaved(p, m, v)).makespan <= simulate(whole).makespan


@pytest.mark.parametrize("name", CHOICES)
def test_sizes_below_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match="^p=0; use a whole number of 1 or more$"):
        make_schedule(name, 0, 4)
    with pytest.raises(ValueError, match="^m=0; use a whole number of 1 or more$"):
        make_schedule(name, 4, 0)
    if name in LOOPED:
        with pytest.raises(ValueError, match="^v=0; use a whole number of 1 or more$"):
            make_schedule(name, 4, 4, 0)
    else:
        with pytest.raises(ValueError, match="^chunks=3 stages a rank with schedule="):
            make_schedule(name, 4, 4, 3)


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="schedule='zb' is unknown; use gpipe, .*; did you mean zb-"):
        make_schedule("zb", 4, 8)


@given(schedules(tuple(name for name in CHOICES if name != "offloaded")))
def test_chunks_per_rank_is_what_the_schedule_has(schedule):
    v = schedule.num_stages // schedule.num_ranks
    asked = v if schedule.name in LOOPED else None
    assert all(len(schedule.stages_of(rank)) == v for rank in range(schedule.num_ranks))
    assert chunks_per_rank(schedule.name, asked) == v
