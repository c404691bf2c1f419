"""What is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from minipar.schedules.deadlock import Deadlock
from minipar.schedules.lower import Receive, Send, lower
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.simulate import simulate
from minipar.schedules.validate import require_matched, validate
from minipar.schedules.zero_bubble import zb_h1
from tests.pipeline.strategies import mutants

F0, B0 = Action("F", 0, 0), Action("B", 1, 0)


def edited(schedule, rank, edit):
    """`schedule` after `edit` has changed the list of `rank`'s actions in place."""
    actions = list(schedule.actions[rank])
    edit(actions)
    return replace(
        schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    )


def test_a_deadlock_is_refused_with_each_blocked_rank_and_the_cycle():
    """Rank 0 wants its gradient back before it sends microbatch 1, rank 1 wants microbatch 1 before."""

    def backward_first(actions):
        actions[1], actions[2] = actions[2], actions[1]

    schedule = edited(one_f_one_b(2, 2), 0, backward_first)
    stuck = edited(schedule, 1, backward_first)
    validate(schedule)
    with pytest.raises(Deadlock) as refusal:
        validate(stuck)
    assert str(refusal.value) == (
        "the schedule '1f1b' deadlocks: "
        "rank 0 cannot run B of microbatch 0 on stage 0 before B of microbatch 0 on stage 1, on rank 1; "
        "rank 1 cannot run F of microbatch 1 on stage 1 before F of microbatch 1 on stage 0, on rank 0; "
        "cycle: rank 0 -> rank 1 -> rank 0"
    )
    assert refusal.value.blocked == {0: Action("B", 0, 0), 1: Action("F", 1, 1)}
    assert refusal.value.cycle == (0, 1)


def test_a_rank_that_waits_for_a_cycle_is_blocked_but_not_on_it():
    rank_0 = (F0, Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    backward_first = (Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1))
    forwards_first = (Action("F", 2, 0), Action("F", 2, 1), Action("B", 2, 0), Action("B", 2, 1))
    with pytest.raises(Deadlock) as refusal:
        validate(Schedule((rank_0, backward_first, forwards_first), (0, 1, 2), 2))
    assert set(refusal.value.blocked) == {0, 1, 2}
    assert refusal.value.cycle == (1, 2)


def test_a_rank_that_waits_for_itself_is_a_cycle_of_one():
    schedule = edited(zb_h1(1, 1), 0, list.reverse)
    with pytest.raises(
        Deadlock, match="rank 0 cannot run W .* before I .*, on rank 0; .*cycle: rank 0 -> rank 0"
    ):
        validate(schedule)


def test_what_is_missing_is_named_where_a_simulation_waits_for_it():
    schedule = edited(one_f_one_b(2, 2), 0, list.pop)
    simulate(schedule)
    with pytest.raises(
        Deadlock, match="before F of microbatch 1 on stage 0, which the schedule does not have"
    ) as refusal:
        simulate(edited(schedule, 0, lambda actions: actions.remove(Action("F", 0, 1))))
    assert refusal.value.cycle == ()
    assert "cycle" not in str(refusal.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (list.pop, "the backward of microbatch 1 on stage 1 has 0 B, 0 I and 0 W"),
        (lambda actions: actions.pop(0), "F of microbatch 0 on stage 1 occurs 0 times"),
        (lambda actions: actions.append(actions[0]), "F of microbatch 0 on stage 1 occurs 2 times"),
        (lambda actions: actions.append(actions[1]), "microbatch 0 on stage 1 has 2 B, 0 I and 0 W"),
        (lambda actions: actions.append(Action("W", 1, 0)), "stage 1 has 1 B, 0 I and 1 W"),
        (lambda actions: actions.append(Action("F", 0, 0)), "on rank 1: rank 0 holds the stage"),
        (lambda actions: actions.append(Action("F", 2, 0)), "on rank 1: there are 2 stages"),
        (lambda actions: actions.append(Action("F", 1, 2)), "on rank 1: there are 2 microbatches"),
        (lambda actions: actions.append(Action("X", 1, 0)), "op='X' on rank 1; use F, B, I or W"),
    ],
)
def test_work_that_is_missing_doubled_or_misplaced_is_refused(edit, message):
    with pytest.raises(ValueError, match=message):
        validate(edited(one_f_one_b(2, 2), 1, edit))


def test_a_stage_on_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="stage 1 is placed on rank 2 of 2 ranks"):
        validate(replace(one_f_one_b(2, 2), stage_rank=(0, 2)))


def test_one_backward_may_be_split_where_its_neighbour_is_whole():
    """B and I both deliver the gradient: either may wait for the other."""
    f, b, i, w = (lambda stage, op=op: Action(op, stage, 0) for op in "FBIW")
    validate(Schedule(((f(0), b(0)), (f(1), i(1), w(1))), (0, 1), 1))
    validate(Schedule(((f(0), i(0), w(0)), (f(1), b(1))), (0, 1), 1))


@given(mutants())
def test_validate_accepts_or_raises_a_value_error_of_one_line(schedule):
    refusal = ""
    try:
        validate(schedule)
    except ValueError as error:
        refusal = str(error)
    assert "\n" not in refusal


def test_messages_in_another_order_at_one_end_are_refused():
    programs = [list(program) for program in lower(one_f_one_b(2, 3))]
    require_matched(programs)
    first, second = (n for n, x in enumerate(programs[1]) if x in (Receive(F0, 0), Send(B0, 0)))
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    with pytest.raises(ValueError, match="rank 0 posts F of microbatch 0 on stage 0 from rank 0, rank 1 "):
        require_matched(programs)
    with pytest.raises(ValueError, match="rank 1 nothing$"):
        require_matched([programs[0], []])
