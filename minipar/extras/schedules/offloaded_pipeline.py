"""A pipeline that moves the activations of some microbatches to CPU memory; `offloaded.py` chooses them."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from torch import Tensor, nn

from minipar.extras.schedules.offloaded import OffloadedSchedule
from minipar.pipeline import Pipeline
from minipar.pipeline.stage import Stage
from minipar.train.recompute import relocate_activations


class OffloadedPipeline(Pipeline):
    """The `Pipeline` of an OffloadedSchedule; stages with something to offload are Transformers."""

    runs = OffloadedSchedule
    schedule: OffloadedSchedule

    def _make_stage(self, module: nn.Module, number: int, *plain: Any) -> Stage:
        away = {k for stage, k in self.schedule.offloaded if stage == number}
        return OffloadedStage(away, module, number, *plain) if away else Stage(module, number, *plain)


class OffloadedStage(Stage):
    """Moves what a stage's blocks save for the backward, and the stage's input, to CPU memory, for some microbatches.

    Between its forward and its backward, an offloaded microbatch holds nothing on the device but whole numbers, such as
    positions, and on the last stage what the head saved. A tensor comes back when the backward needs it. On a GPU
    the copies, to and from pinned memory, run in the order of the computation, so a rank's own computation hides none.
    """

    def __init__(self, offloaded: Set[int], *plain: Any, **options: Any):
        super().__init__(*plain, **options)
        if self.transformer is None:
            raise ValueError(
                f"{len(offloaded)} microbatches offloaded on stage {self.number}, a {type(self.module).__name__}; use a "
                "Transformer, whose blocks can offload what they save"
            )
        if self.recompute:
            raise ValueError(
                f"checkpoint of stage {self.number}, whose microbatches are offloaded; checkpoint its blocks instead "
                "(minipar.train.recompute)"
            )
        self._offloaded = offloaded
        self._moving = False  # whether an offloaded microbatch's forward is running
        relocate_activations(self.transformer, offload=True, when=lambda: self._moving)

    def forward(
        self, k: int, x: Tensor, kwargs: dict[str, Any], finish: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Offload while the module runs on an offloaded microbatch. Its backward, which may recompute, runs as usual."""
        if k not in self._offloaded:
            return super().forward(k, x, kwargs, finish)
        own = x.detach().clone()  # memory of its own: the stage before may have saved x, too
        self._moving = True
        try:
            out = super().forward(k, own, kwargs, finish)
        finally:
            self._moving = False
        if x.is_floating_point():
            self._free(own)
        return out

    @staticmethod
    def _free(x: Tensor) -> None:
        """Free the elements, which are saved elsewhere; autograd needs only the tensor itself, to give it a gradient."""
        x.untyped_storage().resize_(0)
