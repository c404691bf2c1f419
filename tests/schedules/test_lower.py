"""Lowered programs on a transport that promises the least: nothing hangs, nothing is lost."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.schedules.gpipe import gpipe
from minipar.schedules.lower import Compute, Receive, Send, Wait, lower
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import Action, output_key
from minipar.schedules.validate import validate
from tests.pipeline.rendezvous import Hang, Machine
from tests.pipeline.strategies import mutants, schedules
from tests.strategies import seeds


@given(schedules(max_slices=4), st.booleans(), seeds)
def test_no_order_of_events_hangs_a_lowered_schedule(schedule, shared, seed):
    ran = Machine(schedule, lower(schedule), shared).run(Random(seed))
    assert ran == [list(actions) for actions in schedule.actions]


@given(mutants(), st.booleans(), seeds)
def test_a_changed_schedule_is_refused_or_runs_to_its_end(schedule, shared, seed):
    try:
        validate(schedule)
    except ValueError:
        return
    ran = Machine(schedule, lower(schedule), shared).run(Random(seed))
    assert ran == [list(actions) for actions in schedule.actions]


def receive_just_in_time(schedule):
    """The obvious lowering: receive before the action that needs it, send after the one that made it."""
    home = {output_key(action): action for actions in schedule.actions for action in actions}
    wanted_by = {
        home[output_key(need)]: schedule.stage_rank[action.stage]
        for action in home.values()
        for need in schedule.needs(action)
        if schedule.stage_rank[action.stage] != schedule.stage_rank[need.stage]
    }
    programs = []
    for rank, actions in enumerate(schedule.actions):
        program = []
        for action in actions:
            for need in schedule.needs(action):
                if (source := schedule.stage_rank[need.stage]) != rank:
                    program += [Receive(home[output_key(need)], source), Wait(home[output_key(need)])]
            program.append(Compute(action))
            if action in wanted_by:
                program.append(Send(action, wanted_by[action]))
        programs.append(tuple(program))
    return tuple(programs)


def test_an_obvious_lowering_hangs_if_directions_share_an_order():
    """1F1B sends two forwards before it receives a backward, and its neighbour answers the first at once."""
    schedule = one_f_one_b(3, 4)
    Machine(schedule, receive_just_in_time(schedule), shared=False).run(Random(0))
    with pytest.raises(Hang):
        Machine(schedule, receive_just_in_time(schedule), shared=True).run(Random(0))


@given(schedules(max_slices=4))
def test_each_rank_boundary_carries_every_unit_once_a_direction(schedule):
    """The wrap-around of a looped placement counts, the turn of a V does not, nor the end of one copy of the model."""
    sent = Counter(
        (instruction.action.op == "F", instruction.action.stage)
        for program in lower(schedule)
        for instruction in program
        if isinstance(instruction, Send)
    )
    ranks = schedule.stage_rank
    work = schedule.work()
    units = Counter(stage for stage, _ in work)
    inner = [stage for stage, k in work if (stage + 1, k) in work]
    apart = [stage for stage in set(inner) if ranks[stage] != ranks[stage + 1]]
    assert sent == {**{(True, s): units[s] for s in apart}, **{(False, s + 1): units[s] for s in apart}}


@given(schedules(max_slices=4))
def test_every_wait_has_its_receive_and_no_receive_is_left_over(schedule):
    for program in lower(schedule):
        posted = set()
        for instruction in program:
            if isinstance(instruction, Receive):
                posted.add(instruction.action)
            elif isinstance(instruction, Wait):
                posted.remove(instruction.action)
        assert not posted


def test_a_receive_is_up_before_the_action_during_which_it_arrives():
    first_of_last = lower(one_f_one_b(3, 4))[2]
    kinds = [type(instruction).__name__ for instruction in first_of_last[:4]]
    assert kinds == ["Receive", "Receive", "Wait", "Compute"]
    program = lower(gpipe(2, 4))[1]  # microbatch 2 arrives when it has run 0 and 1
    assert program.index(Receive(Action("F", 0, 2), 0)) < program.index(Compute(Action("F", 1, 0)))
