"""A schedule is data: for each rank, the ordered actions it runs. One rule says what an action needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W")
HALVES: tuple[Op, ...] = ("F", "I", "W")  # the parts of a stage's work if the backward is split


class Action(NamedTuple):
    """One piece of work on one microbatch, or on one slice of its tokens, by one stage of the model.

    F   forward
    B   the whole backward: I and W in one
    I   the input-gradient half: the gradient of the stage's input, for which the previous stage waits
    W   the weight-gradient half: the gradients of the stage's weights, for which no other rank waits

    `microbatch` is a microbatch's number. In a schedule that cuts samples into slices it is a unit's number: unit k is
    slice k % slices of microbatch k // slices.
    In a schedule with several copies of the model, of S stages each, stage s is part s % S of copy s // S.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op} of microbatch {self.microbatch} on stage {self.stage}"


def needs(action: Action, num_stages: int, slices: int = 1) -> tuple[Action, ...]:
    """Return the actions whose results `action` consumes: the whole dependency rule of a pipeline.

    num_stages   stages of one copy of the model; a copy's first and last stages need no stage of another copy

    F(s, k)   the activation from stage s-1        F(s-1, k)
    B(s, k)   what the stage's own forward saved   F(s, k)
              the gradient from stage s+1          B(s+1, k)
    I(s, k)   the same two                         F(s, k), I(s+1, k)
    W(s, k)   what the stage's own I saved         I(s, k)

    If samples are cut into slices, an action also needs, on the same stage,

    F(s, k)   keys and values of earlier slices    F(s, k-1), unless k is a sample's first slice
    B(s, k)   their gradients from later slices    B(s, k+1), unless k is a sample's last slice; the same for I

    A schedule may split the backward of stage s but not that of stage s+1. B(s+1, k) and I(s+1, k) both produce
    the gradient; `needs` returns the one with the op of `action`, and `output_key` is the same for both.
    """
    op, stage, k = action
    if op == "W":
        return (Action("I", stage, k),)
    before: tuple[Action, ...] = ()
    if op == "F":
        if stage % num_stages:
            before += (Action("F", stage - 1, k),)
        if k % slices:
            before += (Action("F", stage, k - 1),)
        return before
    before += (Action("F", stage, k),)
    if (stage + 1) % num_stages:
        before += (Action(op, stage + 1, k),)
    if (k + 1) % slices:
        before += (Action(op, stage, k + 1),)
    return before


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
    slices             s, the number of slices into which the tokens of every sample are cut; an action works on one slice
    copies             number of copies of the model; stages are numbered copy after copy, and a microbatch passes through
                       one copy. With two copies, ranks r and p-1-r hold the same parts of the model
    offloaded          (stage, unit) pairs whose activations are in CPU memory between forward and backward
    """

    actions: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]
    num_microbatches: int
    name: str = "custom"
    slices: int = 1
    copies: int = 1
    offloaded: frozenset[tuple[int, int]] = frozenset()

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of stages of all copies of the model together."""
        return len(self.stage_rank)

    @property
    def model_stages(self) -> int:
        """The number of stages of one copy of the model."""
        return len(self.stage_rank) // self.copies

    @property
    def num_units(self) -> int:
        """The number of units of work, m * slices: each stage runs F once per unit."""
        return self.num_microbatches * self.slices

    def unit_label(self, k: int) -> str:
        """Return the name of unit k: its microbatch's number and, if there are slices, a dot and its slice's number."""
        return str(k) if self.slices == 1 else f"{k // self.slices}.{k % self.slices}"

    def part(self, stage: int) -> int:
        """Return the stage's number within its copy of the model; with one copy, its own number."""
        return stage % self.model_stages

    def is_first(self, stage: int) -> bool:
        """Return whether the stage has the embedding."""
        return self.part(stage) == 0

    def is_last(self, stage: int) -> bool:
        """Return whether the stage has the head and the loss."""
        return self.part(stage) == self.model_stages - 1

    def visits(self, rank: int) -> tuple[tuple[Action, ...], ...]:
        """Return the rank's actions that compute with parameters, so without W, as runs of actions on one stage.

        A rank needs a stage's parameters from the beginning to the end of a visit. Breadth-first visits each of its v
        stages twice, but the last one once, as its first B follows its last F: 2v - 1 visits.
        """
        used = (action for action in self.actions[rank] if action.op != "W")
        return tuple(tuple(run) for _, run in groupby(used, key=lambda action: action.stage))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in the order of the model's parts."""
        own = (stage for stage, owner in enumerate(self.stage_rank) if owner == rank)
        return tuple(sorted(own, key=self.part))


def first_microbatches(m: int, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return `actions` without those on microbatch m or later.

    What remains of a valid schedule is valid, because no action needs an action on another microbatch. So an
    order that is defined only for some m can be used for every smaller m.
    """
    return tuple(action for action in actions if action.microbatch < m)
