"""One stage of a pipeline: forward and backward of one microbatch, the backward whole or in its two halves."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from minipar.model import Transformer, WeightGradients, defer_weight_gradients
from minipar.model.overrides import GradientSync
from minipar.pipeline.slices import SequenceSlices

Product = Callable[[], None]


class Stage:
    """A module, with what it saves for each microbatch between its forward and the end of its backward.

    module   any module from one tensor to one tensor
    number   which part of the model it is; part 0 computes no gradient of its input
    split    the microbatches whose backward runs as I and W
    remat    activation checkpointing: save a microbatch's input only, and recompute the forward in the backward
    slices   of every sample's tokens. Where there are several, "microbatch" below is a unit, microbatch * slices + slice;
             the stage must be a Transformer, whose attentions then see the earlier slices

    The output itself is not saved, only its autograd edge. I computes input gradients and queues the
    weight-gradient products of the layers that can defer them (`defer_weight_gradients`); W runs these products.
    All other gradients are complete after I.
    """

    def __init__(self, module: nn.Module, number: int, split: Set[int], remat: bool, slices: int = 1):
        self.module, self.number, self.split, self.remat = module, number, split, remat
        self.transformer, self.slices = unwrapped(module), slices
        if slices > 1 and self.transformer is None:
            raise ValueError(
                f"slices={slices} of a sample on stage {number}, a {type(module).__name__}; use a Transformer, whose "
                "attentions can see earlier slices"
            )
        self._earlier = SequenceSlices(self.transformer, slices) if slices > 1 else None
        self._queue, self._deferring = WeightGradients(), False
        self._sync = ExitStack()

    def begin(self, num_units: int) -> None:
        """Start a step. Data parallelism reduces no gradients before the stage's last backward or W."""
        self._kept: dict[int, tuple] = {}  # microbatch -> (input, output's autograd edge)
        self._products: dict[int, list[Product]] = {}
        self._left = num_units
        self._reduced = False  # did the last backward reduce the gradients?
        self._sync = ExitStack()
        if isinstance(self.module, GradientSync):
            self._sync.enter_context(self.module.no_sync())

    def forward(self, microbatch: int, x: Tensor, kwargs: dict, finish: Callable | None = None) -> Tensor:
        """Run F; return the module's output, or on the last stage the result of `finish` on it."""
        self._defer(microbatch in self.split)
        x = x.detach()
        if self.number:
            x.requires_grad_()
        with self._seeing_earlier_slices(microbatch):
            out = self._call(x, self._completed(kwargs, microbatch, x))
        if not isinstance(out, Tensor):
            raise ValueError(
                f"stage {self.number} returned a {type(out).__name__}; use a module that returns one tensor"
            )
        out = finish(out) if finish else out
        if torch.is_grad_enabled():
            self._kept[microbatch] = (x, get_gradient_edge(out) if out.requires_grad else None)
        elif self._earlier is not None and (microbatch + 1) % self.slices == 0:
            self._earlier.release(microbatch + 1 - self.slices)
        return out.detach()

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """Run B or I; return the gradient of the input, None for part 0."""
        self._defer(microbatch in self.split)
        x, edge = self._kept.pop(microbatch)
        if edge is not None:
            if self._left == 1 and microbatch not in self.split:
                # The stage's last action of the step: data parallelism reduces gradients while it runs.
                self._sync.close()
                self._reduced = True
            edges, gradients = self._earlier.gradients(microbatch) if self._earlier else ([], [])
            with self._seeing_earlier_slices(microbatch):
                torch.autograd.backward((edge, *edges), (gradient, *gradients))
        if self._earlier is not None:
            self._earlier.release(microbatch)
        if microbatch in self.split:
            self._products[microbatch] = self._queue.pop_all()
        else:
            self._left -= 1
        if not self.number:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight_backward(self, microbatch: int) -> None:
        """Run W."""
        products = self._products.pop(microbatch)
        while products:
            products.pop(0)()  # removed from the list, so that its tensors are freed
        self._left -= 1

    @property
    def done(self) -> bool:
        """Whether the last gradient of the step has been computed."""
        return self._left == 0

    def synchronize(self) -> None:
        """Sum the gradients over replicas, if the module is wrapped in data parallelism and its last backward did not."""
        self._sync.close()
        if isinstance(self.module, GradientSync) and not self._reduced:
            self.module.synchronize()

    def end(self) -> None:
        """Restore the module and drop what was saved, also after an error."""
        self._sync.close()
        self._defer(False)
        self._kept, self._products = {}, {}
        if self._earlier is not None:
            self._earlier.clear()

    def _defer(self, wanted: bool) -> None:
        # A forward that is recomputed in the backward must defer as the first did, so forward and backward call this.
        if wanted != self._deferring:
            self._deferring = wanted
            defer_weight_gradients(self.module, self._queue if wanted else None)

    def _call(self, x: Tensor, kwargs: dict):
        if self.remat:
            return checkpoint(self.module, x, use_reentrant=False, **kwargs)
        return self.module(x, **kwargs)

    def _seeing_earlier_slices(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._earlier is None else self._earlier.visible(microbatch)

    def _completed(self, kwargs: dict, microbatch: int, x: Tensor) -> dict:
        """Number a Transformer's samples over the whole batch, so that its dropout does not depend on the microbatches.

        Where samples are cut into slices, also cut their positions.
        """
        if self._earlier is not None:
            kwargs = self._earlier.cut(kwargs, x, microbatch)
        if self.transformer is None or "sample_ids" in kwargs:
            return kwargs
        first, size = microbatch // self.slices * x.shape[0], x.shape[0]
        return {**kwargs, "sample_ids": torch.arange(first, first + size, device=x.device)}


def unwrapped(module: nn.Module) -> Transformer | None:
    """Return the Transformer inside wrappers that hold it as `.module`; None where the module is something else."""
    while not isinstance(module, Transformer):
        if not isinstance(getattr(module, "module", None), nn.Module):
            return None
        module = module.module
    return module
