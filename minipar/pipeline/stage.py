"""One stage of a pipeline: forward and backward of one unit of work, with the backward in one action or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from minipar.model import Transformer, WeightGradients, defer_weight_gradients
from minipar.model.deferrable_linear import Product
from minipar.model.overrides import GradientSync, Resharding
from minipar.pipeline.stage_state import make_stage_state


class Stage:
    """A module, and what it saves for each unit of work between the unit's forward and the end of its backward.

    module     any module from one tensor to one tensor
    number     the stage's number in the model; stage 0 computes no gradient of its input
    split      the units whose backward runs as I and W
    recompute  activation checkpointing: save a unit's input only, and recompute the forward in the backward
    slices     number of slices of each sample's tokens. A unit is a microbatch or, where there are several slices, a slice
               of a microbatch; the module must then be a Transformer, whose attention sees the earlier slices: see
               `stage_state.py`
    offloaded  the units whose activations are moved to CPU memory between forward and backward

    The output itself is not saved, only its autograd edge. I computes input gradients and queues the
    weight-gradient products of the layers that can defer them (`defer_weight_gradients`); W runs these products.
    All other gradients are complete after I.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        split: Set[int],
        recompute: bool,
        slices: int = 1,
        offloaded: Set[int] = frozenset(),
    ):
        self.module, self.number = module, number
        self.split, self.recompute, self.slices = split, recompute, slices
        self.transformer = unwrapped(module)
        self._state = make_stage_state(
            self.transformer, slices, offloaded, f"{number}, a {type(module).__name__}"
        )
        self._queue = WeightGradients()
        self._deferring = False
        self._sync = ExitStack()

    def begin(self, num_units: int) -> None:
        """Start a step. Data parallelism reduces no gradients before the stage's last backward or W."""
        # Unit -> (input, output's autograd edge).
        self._kept: dict[int, tuple[Tensor, GradientEdge | None]] = {}
        self._products: dict[int, list[Product]] = {}
        self._left = num_units
        self._reduced = False  # whether the last backward has reduced the gradients
        self._sync = ExitStack()
        if isinstance(self.module, GradientSync):
            self._sync.enter_context(self.module.no_sync())

    def forward(
        self, unit: int, x: Tensor, kwargs: dict[str, Any], finish: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run F; return the module's output or, where `finish` is given, `finish(output)`."""
        self._defer(unit in self.split)
        x = x.detach()
        if self.number:
            x.requires_grad_()
        with self._state.visible(unit):
            out = self._call(x, self._completed(kwargs, unit, x))
        if not isinstance(out, Tensor):
            raise ValueError(
                f"stage {self.number} returned a {type(out).__name__}; use a module that returns one tensor"
            )
        if finish is not None:
            out = finish(out)
        if torch.is_grad_enabled():
            self._kept[unit] = (x, get_gradient_edge(out) if out.requires_grad else None)
        elif (unit + 1) % self.slices == 0:
            self._state.release(unit + 1 - self.slices)
        return out.detach()

    def backward(self, unit: int, gradient: Tensor) -> Tensor | None:
        """Run B or I; return the gradient of the input, None for stage 0."""
        self._defer(unit in self.split)
        x, edge = self._kept.pop(unit)
        if edge is not None:
            if self._left == 1 and unit not in self.split:
                # The stage's last action of the step: data parallelism reduces gradients while it runs.
                self._sync.close()
                self._reduced = True
            edges, gradients = self._state.gradients(unit)
            with self._state.visible(unit):
                torch.autograd.backward((edge, *edges), (gradient, *gradients))
        self._state.release(unit)
        if unit in self.split:
            self._products[unit] = self._queue.pop_all()
        else:
            self._left -= 1
        if not self.number:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight_backward(self, unit: int) -> None:
        """Run W."""
        products = self._products.pop(unit)
        while products:
            products.pop(0)()  # removed from the list, so that its tensors are freed
        self._left -= 1

    @property
    def done(self) -> bool:
        """True once the last gradient of the step has been computed."""
        return self._left == 0

    def synchronize(self) -> None:
        """Sum the gradients over replicas if the module is wrapped in data parallelism, unless its last backward did so."""
        self._sync.close()
        if isinstance(self.module, GradientSync) and not self._reduced:
            self.module.synchronize()

    def reshard(self) -> None:
        """Free the unsharded parameters if the module is wrapped in FSDP."""
        if isinstance(self.module, Resharding):
            self.module.reshard()

    def end(self) -> None:
        """Restore the module and drop what was saved, also after an error."""
        self._sync.close()
        self._defer(False)
        self._kept, self._products = {}, {}
        self._state.clear()

    def _defer(self, wanted: bool) -> None:
        # A recomputed forward must defer as the first forward did, so both forward and backward call this.
        if wanted != self._deferring:
            self._deferring = wanted
            defer_weight_gradients(self.module, self._queue if wanted else None)

    def _call(self, x: Tensor, kwargs: dict[str, Any]) -> Any:
        if self.recompute:
            return checkpoint(self.module, x, use_reentrant=False, **kwargs)
        return self.module(x, **kwargs)

    def _completed(self, kwargs: dict[str, Any], unit: int, x: Tensor) -> dict[str, Any]:
        """Number a Transformer's samples over the whole batch, so that its dropout does not depend on the microbatches.

        Where samples are cut into slices, also cut their positions.
        """
        kwargs = self._state.cut(kwargs, x, unit)
        if self.transformer is None or "sample_ids" in kwargs:
            return kwargs
        num_samples = x.shape[0]
        first = unit // self.slices * num_samples
        return {**kwargs, "sample_ids": torch.arange(first, first + num_samples, device=x.device)}


def unwrapped(module: nn.Module) -> Transformer | None:
    """Return the Transformer inside wrappers that hold it as `.module`; None if the module is something else."""
    while not isinstance(module, Transformer):
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module
