"""The state that a stage keeps from one unit of work to the next: none, unless a schedule cuts or offloads samples.

A unit is a microbatch, or one slice of it; its number is microbatch * slices + slice.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from minipar.model import Transformer
from minipar.support.registry import Choice, Kind


class StageState(Protocol):
    """The state that a stage keeps between the slices of a sample, or while a unit's activations are offloaded.

    "slices" is made with (Transformer, slices), "offload" with (Transformer, the units to offload).

    visible    a context for a unit's forward and backward, in which attention sees the earlier slices
    cut        the keyword arguments of whole samples, cut to the unit's tokens; called before the unit's forward
    gradients  (autograd edges, gradients) from which a unit's backward starts, in addition to the output's
    release    drop a unit's state after its backward
    clear      drop all state
    """

    def visible(self, unit: int) -> AbstractContextManager[None]: ...

    def cut(self, kwargs: dict[str, Any], x: Tensor, unit: int) -> dict[str, Any]: ...

    def gradients(self, unit: int) -> tuple[list[GradientEdge], list[Tensor]]: ...

    def release(self, unit: int) -> None: ...

    def clear(self) -> None: ...


class WholeSamples:
    """The `StageState` of whole samples: a unit is a microbatch, and nothing is kept between microbatches."""

    def visible(self, unit: int) -> AbstractContextManager[None]:
        return nullcontext()

    def cut(self, kwargs: dict[str, Any], x: Tensor, unit: int) -> dict[str, Any]:
        return kwargs

    def gradients(self, unit: int) -> tuple[list[GradientEdge], list[Tensor]]:
        return [], []

    def release(self, unit: int) -> None:
        pass

    def clear(self) -> None:
        pass


STAGE_STATES: Kind[Choice] = Kind("stage_state", {})


def make_stage_state(
    transformer: Transformer | None, slices: int, offloaded: Set[int], stage: str
) -> StageState:
    """Return a new state for a stage, which offloads the units `offloaded`.

    Raises ValueError if slices or offloading need a Transformer; `stage` names the stage in the error.
    """
    if slices == 1 and not offloaded:
        return WholeSamples()
    if transformer is None:
        what = f"{len(offloaded)} units offloaded" if offloaded else f"slices={slices} of a sample"
        why = "blocks can offload what they save" if offloaded else "attentions can see earlier slices"
        raise ValueError(f"{what} on stage {stage}; use a Transformer, whose {why}")
    state: StageState
    if offloaded:
        state = STAGE_STATES["offload"].load()(transformer, offloaded)
    else:
        state = STAGE_STATES["slices"].load()(transformer, slices)
    return state
