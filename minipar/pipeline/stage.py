"""One stage of a pipeline: forward and backward of one microbatch, with the backward in one action or in two halves."""

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


class Stage:
    """A module, and what it saves for each microbatch between its forward and the end of its backward.

    module            any module from one tensor to one tensor
    number            the stage's number in the model; stage 0 computes no gradient of its input
    num_microbatches  how many it runs in a step
    split             the microbatches whose backward runs as I and W
    recompute         activation checkpointing: save a microbatch's input only, and recompute the forward in the backward

    The output itself is not saved, only its autograd edge. I computes input gradients and queues the
    weight-gradient products of the layers that can defer them (`defer_weight_gradients`); W runs these products.
    All other gradients are complete after I.
    """

    def __init__(
        self, module: nn.Module, number: int, num_microbatches: int, split: Set[int], recompute: bool = False
    ):
        self.module, self.number, self.num_microbatches = module, number, num_microbatches
        self.split, self.recompute = split, recompute
        self.transformer = unwrapped(module)
        self._queue = WeightGradients()
        self._deferring = False
        self._sync = ExitStack()

    def begin(self) -> None:
        """Start a step. Data parallelism reduces no gradients before the stage's last backward or W."""
        # Microbatch -> (input, output's autograd edge).
        self._kept: dict[int, tuple[Tensor, GradientEdge | None]] = {}
        self._products: dict[int, list[Product]] = {}
        self._left = self.num_microbatches
        self._reduced = False  # whether the last backward has reduced the gradients
        self._sync = ExitStack()
        if isinstance(self.module, GradientSync):
            self._sync.enter_context(self.module.no_sync())

    def forward(
        self, k: int, x: Tensor, kwargs: dict[str, Any], finish: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run F of microbatch k; return the module's output or, where `finish` is given, `finish(output)`."""
        self._defer(k in self.split)
        x = x.detach()
        if self.number:
            x.requires_grad_()
        out = self._call(k, x, kwargs)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"stage {self.number} returned a {type(out).__name__}; use a module that returns one tensor"
            )
        if finish is not None:
            out = finish(out)
        if torch.is_grad_enabled():
            self._kept[k] = (x, get_gradient_edge(out) if out.requires_grad else None)
        return out.detach()

    def backward(self, k: int, gradient: Tensor) -> Tensor | None:
        """Run B or I of microbatch k; return the gradient of the input, None for stage 0."""
        self._defer(k in self.split)
        x, edge = self._kept.pop(k)
        if edge is not None:
            if self._left == 1 and k not in self.split:
                # The stage's last action of the step: data parallelism reduces gradients while it runs.
                self._sync.close()
                self._reduced = True
            self._backpropagate(k, edge, gradient)
        if k in self.split:
            self._products[k] = self._queue.pop_all()
        else:
            self._left -= 1
        if not self.number:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def weight_backward(self, k: int) -> None:
        """Run W of microbatch k."""
        products = self._products.pop(k)
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

    def _defer(self, wanted: bool) -> None:
        # A recomputed forward must defer as the first forward did, so both forward and backward call this.
        if wanted != self._deferring:
            self._deferring = wanted
            defer_weight_gradients(self.module, self._queue if wanted else None)

    def _call(self, k: int, x: Tensor, kwargs: dict[str, Any]) -> Any:
        """Run the module on microbatch k.

        A Transformer's samples are numbered over the whole batch, so that its dropout does not depend on the microbatches.
        """
        if self.transformer is not None and "sample_ids" not in kwargs:
            kwargs = {**kwargs, "sample_ids": self._sample_ids(k, x)}
        if self.recompute:
            return checkpoint(self.module, x, use_reentrant=False, **kwargs)
        return self.module(x, **kwargs)

    def _sample_ids(self, k: int, x: Tensor) -> Tensor:
        return torch.arange(k * x.shape[0], (k + 1) * x.shape[0], device=x.device)

    def _backpropagate(self, k: int, edge: GradientEdge, gradient: Tensor) -> None:
        torch.autograd.backward(edge, gradient)


def unwrapped(module: nn.Module) -> Transformer | None:
    """Return the Transformer inside wrappers that hold it as `.module`; None if the module is something else."""
    while not isinstance(module, Transformer):
        inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module
