"""A schedule is data: for each rank, the ordered actions it runs. One rule says what an action needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, product
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W")
HALVES: tuple[Op, ...] = ("F", "I", "W")  # the parts of a stage's work if the backward is split


class Action(NamedTuple):
    """One piece of work on one microbatch by one stage of the model.

    F   forward
    B   the whole backward: I and W in one
    I   the input-gradient half: the gradient of the stage's input, for which the previous stage waits
    W   the weight-gradient half: the gradients of the stage's weights, for which no other rank waits
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op} of microbatch {self.microbatch} on stage {self.stage}"


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the actions whose results `action` consumes: the whole dependency rule of a pipeline.

    F(s, k)   the activation from stage s-1        F(s-1, k)
    B(s, k)   what the stage's own forward saved   F(s, k)
              the gradient from stage s+1          B(s+1, k)
    I(s, k)   the same two                         F(s, k), I(s+1, k)
    W(s, k)   what the stage's own I saved         I(s, k)

    A schedule may split the backward of stage s but not that of stage s+1. B(s+1, k) and I(s+1, k) both produce
    the gradient; `needs` returns the one with the op of `action`, and `output_key` is the same for both.
    """
    op, stage, k = action
    if op == "W":
        return (Action("I", stage, k),)
    if op == "F":
        return (Action("F", stage - 1, k),) if stage else ()
    own = Action("F", stage, k)
    return (own, Action(op, stage + 1, k)) if stage + 1 < num_stages else (own,)


def output_key(action: Action) -> Action:
    """Return the key of the result of `action`. B and I both produce the input gradient, so B has the key of its I."""
    return Action("I", action.stage, action.microbatch) if action.op == "B" else action


@dataclass(frozen=True)
class Schedule:
    """Each rank's actions in order, without durations or idle time, which belong to a timeline.

    actions            actions[rank] are the actions of that rank, in the order in which it runs them
    stage_rank         stage_rank[stage] is the rank that holds the stage
    num_microbatches   m; microbatches are numbered 0 ... m-1
    name               used in error messages and plots

    `needs`, `work`, `live_change` and `label` are rules that everybody asks: validator, simulator, executor and plots. A
    subclass may have other rules; then it also has a `Pipeline` of its own, unless it is only drawn.
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

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results `action` consumes."""
        return needs(action, self.num_stages)

    def work(self) -> set[tuple[int, int]]:
        """Return every (stage, microbatch) that has to run forward and backward, once each."""
        return set(product(range(self.num_stages), range(self.num_microbatches)))

    def live_change(self, action: Action) -> tuple[int, int]:
        """Return the change of a rank's live activations at the start and at the end of `action`.

        Activations of a stage for a microbatch are live from the start of F to the end of B or, if it is split, of W.
        """
        return int(action.op == "F"), -int(action.op in "BW")

    def label(self, microbatch: int) -> str:
        """Return the microbatch's number as plots show it."""
        return str(microbatch)

    def visits(self, rank: int) -> tuple[tuple[Action, ...], ...]:
        """Return the rank's actions that compute with parameters, so without W, as runs of actions on one stage.

        A rank needs a stage's parameters from the beginning to the end of a visit. Breadth-first visits each of its v
        stages twice, but the last one once, as its first B follows its last F: 2v - 1 visits.
        """
        used = (action for action in self.actions[rank] if action.op != "W")
        return tuple(tuple(run) for _, run in groupby(used, key=lambda action: action.stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)


def first_microbatches(m: int, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return `actions` without those on microbatch m or later.

    What remains of a valid schedule is valid, because no action needs an action on another microbatch. So an
    order that is defined only for some m can be used for every smaller m.
    """
    return tuple(action for action in actions if action.microbatch < m)
