"""A schedule is data: for each rank, the ordered actions it runs. One rule says what an action needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work on one microbatch by one stage of the model.

    F   forward
    B   the whole backward, that is I and W in one
    I   its first half: the gradient of the stage's input, which the stage before is waiting for
    W   its second half: the gradient of the stage's weights, for which nobody waits
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op} of microbatch {self.microbatch} on stage {self.stage}"


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions whose results `action` consumes: the whole dependency rule of a pipeline.

    F(s, k)   the activation of stage s-1      F(s-1, k)
    B(s, k)   what its own forward kept        F(s, k)
              the gradient from stage s+1      B(s+1, k)
    I(s, k)   the same two                     F(s, k), I(s+1, k)
    W(s, k)   what its other half kept         I(s, k)

    A schedule may split the backward of stage s and not that of stage s+1. Either letter, B or I, delivers
    the gradient; `needs` names it by the letter of the action that asks, and `result` is equal for both.
    """
    op, stage, microbatch = action
    if op == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if op == "W":
        return (Action("I", stage, microbatch),)
    forward = Action("F", stage, microbatch)
    if stage == num_stages - 1:
        return (forward,)
    return (forward, Action(op, stage + 1, microbatch))


def output_key(action: Action) -> Action:
    """What `action` leaves behind, by one name: B leaves the input gradient, so it counts as its I."""
    return Action("I", action.stage, action.microbatch) if action.op == "B" else action


@dataclass(frozen=True)
class Schedule:
    """Who runs what, in which order. No durations and no idle time: those belong to a timeline.

    actions            actions[rank] is what that rank runs, in this order
    stage_rank         stage_rank[stage] is the rank that holds the stage
    num_microbatches   m; microbatches are numbered 0 ... m-1
    name               for messages and pictures
    """

    actions: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    num_microbatches: int
    name: str = "custom"

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)


def first_microbatches(m: int, actions) -> tuple[Action, ...]:
    """`actions` without those on microbatch m and after.

    What remains of a valid schedule is valid, for no action needs one of another microbatch. So an order
    defined for some m only serves any smaller m.
    """
    return tuple(action for action in actions if action.microbatch < m)
