"""Moves the units that a schedule offloads, out of a stage and back; `offloaded.py` chooses them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from minipar.model import Transformer
from minipar.pipeline.stage_state import WholeSamples
from minipar.train.recompute import relocate_activations


class OffloadedUnits(WholeSamples):
    """Moves what a stage's blocks save for the backward, and the stage's input, to CPU memory, for some units.

    Between its forward and its backward, an offloaded unit holds nothing on the device but whole numbers, such as
    positions, and on the last stage what the head saved. A tensor comes back when the backward needs it. On a GPU
    the copies, to and from pinned memory, run in the order of the computation, so a rank's own computation hides none.
    """

    def __init__(self, transformer: Transformer, offloaded: Set[int]):
        self._offloaded = offloaded
        self._between: set[int] = set()  # offloaded units between their forward and their backward
        self._moving = False  # whether an offloaded unit's forward is running
        self._input: Tensor | None = None  # of that unit
        relocate_activations(transformer, offload=True, when=lambda: self._moving)

    @contextmanager
    def visible(self, unit: int) -> Iterator[None]:
        """Offload while the unit's forward runs. Its backward, which may recompute, runs as usual."""
        self._moving = unit in self._offloaded and unit not in self._between
        try:
            yield
            if self._moving:
                self._between.add(unit)
            if self._input is not None:
                # Its elements are saved elsewhere; autograd needs only the tensor itself, to give it a gradient.
                self._input.untyped_storage().resize_(0)
        finally:
            self._moving, self._input = False, None

    def cut(self, kwargs: dict[str, Any], x: Tensor, unit: int) -> dict[str, Any]:
        """Give the input of a forward to be offloaded memory of its own: the stage before may have saved it, too."""
        if self._moving and x.is_floating_point():
            x.data = x.detach().clone()
            self._input = x
        return kwargs

    def release(self, unit: int) -> None:
        self._between.discard(unit)

    def clear(self) -> None:
        self._between.clear()
