"""One stage at work: forward and backward of one microbatch, the backward whole or in its two halves."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from minipar.model import Transformer, WeightGradients, defer_weight_gradients

Product = Callable[[], None]


class Stage:
    """A module, with what it keeps of each microbatch between its forward and the end of its backward.

    module   any module from one tensor to one tensor
    number   its place in the pipeline; stage 0 owes nobody a gradient of its input
    split    the microbatches whose backward is I and W
    remat    keep a microbatch's input only, and run the forward again before the backward

    An output is not kept: where the backward begins in the graph is enough. W runs the products that I has put
    off, of the layers that can wait (`defer_weight_gradients`); all other gradients are complete after I.
    """

    def __init__(self, module: nn.Module, number: int, split: Set[int], remat: bool):
        self.module, self.number, self.split, self.remat = module, number, split, remat
        self.transformer = unwrapped(module)
        self._queue, self._deferring = WeightGradients(), False
        self._sync = ExitStack()

    def begin(self, num_microbatches: int) -> None:
        """Start a step. Gradients stay on this rank until the last of them is there."""
        self._kept: dict[int, tuple] = {}  # microbatch -> (input, where its backward begins)
        self._products: dict[int, list[Product]] = {}
        self._left = num_microbatches
        self._reduced = False  # by the last backward itself
        self._sync = ExitStack()
        if hasattr(self.module, "no_sync"):
            self._sync.enter_context(self.module.no_sync())

    def forward(self, microbatch: int, x: Tensor, kwargs: dict, finish: Callable | None = None) -> Tensor:
        """Run F: the module's output, or on the last stage what `finish` makes of it."""
        self._defer(microbatch in self.split)
        x = x.detach()
        if self.number:
            x.requires_grad_()
        out = self._call(x, self._completed(kwargs, microbatch, x))
        if not isinstance(out, Tensor):
            raise ValueError(
                f"stage {self.number} returned a {type(out).__name__}; use a module that returns one tensor"
            )
        out = finish(out) if finish else out
        self._kept[microbatch] = (x, get_gradient_edge(out) if out.requires_grad else None)
        return out.detach()

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """Run B, or I: the gradient of the input, which is None on stage 0."""
        self._defer(microbatch in self.split)
        x, edge = self._kept.pop(microbatch)
        if edge is not None:
            if self._left == 1 and microbatch not in self.split:
                # The stage's last work of the step, and whole: replicas are summed while it runs.
                self._sync.close()
                self._reduced = True
            torch.autograd.backward((edge,), (gradient,))
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
            products.pop(0)()  # and let go of its tensors
        self._left -= 1

    @property
    def done(self) -> bool:
        """Has the last gradient of the step been computed?"""
        return self._left == 0

    def synchronize(self) -> None:
        """Sum the gradients over replicas, where the module is wrapped in something that does and has not yet."""
        self._sync.close()
        if hasattr(self.module, "synchronize") and not self._reduced:
            self.module.synchronize()

    def end(self) -> None:
        """Leave the module as it was, whatever happened."""
        self._sync.close()
        self._defer(False)
        self._kept, self._products = {}, {}

    def _defer(self, wanted: bool) -> None:
        # A forward that is run again in the backward must take the same path, so both ask for it.
        if wanted != self._deferring:
            self._deferring = wanted
            defer_weight_gradients(self.module, self._queue if wanted else None)

    def _call(self, x: Tensor, kwargs: dict):
        if self.remat:
            return checkpoint(self.module, x, use_reentrant=False, **kwargs)
        return self.module(x, **kwargs)

    def _completed(self, kwargs: dict, microbatch: int, x: Tensor) -> dict:
        """The arguments, with a Transformer's samples numbered over the whole batch: so its dropout ignores the cut."""
        if self.transformer is None or "sample_ids" in kwargs:
            return kwargs
        first, size = microbatch * x.shape[0], x.shape[0]
        return {**kwargs, "sample_ids": torch.arange(first, first + size, device=x.device)}


def unwrapped(module: nn.Module) -> Transformer | None:
    """The Transformer inside wrappers that hold theirs as `.module`; None where it is something else."""
    while not isinstance(module, Transformer):
        if not isinstance(getattr(module, "module", None), nn.Module):
            return None
        module = module.module
    return module
