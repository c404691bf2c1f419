"""One interface for every ZeRO stage: what the trainer, the loss scaler and checkpoints need of an optimizer.

`ZeroOptimizer` implements it. `TorchOptimizerAdapter` implements it for a torch optimizer over DDP's or
FSDP's parameters, where the wrapper around the model, not the optimizer, reduces the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class OptimizerInterface(Protocol):
    """The optimizer interface.

    param_groups   options, the learning rate among them
    tensors        the tensors this rank updates: each with its Placement and, after a backward, its `.grad`
    tensors_and_states()  pairs of a tensor, or its master copy, and its optimizer state
    no_sync()      a context whose backwards only accumulate, if it is the optimizer that reduces gradients
    synchronize()  reduce the accumulated gradients
    reduce_pending()  the same, unless a backward has reduced them already
    step()         divide the gradients by `grad_scale`, and update
    """

    param_groups: list[dict]

    @property
    def tensors(self) -> list[Tensor]: ...

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]: ...

    def no_sync(self) -> AbstractContextManager: ...

    def synchronize(self) -> None: ...

    def reduce_pending(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self, *, grad_scale: float = 1.0): ...


class TorchOptimizerAdapter:
    """`OptimizerInterface` of a torch optimizer whose gradients are reduced by DDP or FSDP, or not at all."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def tensors(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        return ((p, self.optimizer.state[p]) for p in self.tensors)

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: the wrapper around the model has reduced them."""

    def reduce_pending(self) -> None:
        """Do nothing: the wrapper around the model has reduced them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, *, grad_scale: float = 1.0):
        gradients = [p.grad.as_subclass(Tensor) for p in self.tensors if p.grad is not None]
        if grad_scale != 1 and gradients:
            torch._foreach_div_(gradients, grad_scale)
        return self.optimizer.step()


def as_optimizer_interface(optimizer: torch.optim.Optimizer) -> OptimizerInterface:
    """Return the optimizer itself where it implements `OptimizerInterface`, else a `TorchOptimizerAdapter` of it."""
    return optimizer if hasattr(optimizer, "tensors_and_states") else TorchOptimizerAdapter(optimizer)
