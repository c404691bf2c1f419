"""One optimizer interface for every ZeRO stage: all that the trainer, the loss scaler and checkpoints need.

`ZeroOptimizer` implements it. `TorchOptimizerAdapter` implements it for a torch optimizer over DDP's or
FSDP's parameters, where the wrapper around the model, not the optimizer, reduces the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from minipar.data_parallel.arguments import ParamGroup

State = dict[str, Any]  # a tensor's optimizer state, by key


class OptimizerInterface(Protocol):
    """An optimizer of any ZeRO stage.

    param_groups   options, such as the learning rate
    tensors        the tensors that this rank updates, each with a Placement and, after a backward, a `.grad`
    tensors_and_states()  pairs of a tensor, or its master copy, and its optimizer state
    no_sync()      a context in which backwards only accumulate; it has an effect if the optimizer itself reduces gradients
    synchronize()  reduce the accumulated gradients
    reduce_pending()  reduce the accumulated gradients, unless a backward has done so already
    step()         divide the gradients by `grad_scale`, and update
    """

    @property
    def param_groups(self) -> list[ParamGroup]: ...

    @property
    def tensors(self) -> list[Tensor]: ...

    def tensors_and_states(self) -> Iterator[tuple[Tensor, State]]: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def synchronize(self) -> None: ...

    def reduce_pending(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self, *, grad_scale: float = 1.0) -> Any: ...


class TorchOptimizerAdapter:
    """An `OptimizerInterface` around a torch optimizer. If gradients are reduced, DDP or FSDP does that."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups

    @property
    def tensors(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors_and_states(self) -> Iterator[tuple[Tensor, State]]:
        return ((p, self.optimizer.state[p]) for p in self.tensors)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: the wrapper around the model has reduced the gradients."""

    def reduce_pending(self) -> None:
        """Do nothing: the wrapper around the model has reduced the gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, *, grad_scale: float = 1.0) -> Any:
        gradients = [p.grad.as_subclass(Tensor) for p in self.tensors if p.grad is not None]
        if grad_scale != 1 and gradients:
            torch._foreach_div_(gradients, grad_scale)
        return self.optimizer.step()


def as_optimizer_interface(optimizer: OptimizerInterface | torch.optim.Optimizer) -> OptimizerInterface:
    """Return the optimizer itself if it implements `OptimizerInterface`, else a `TorchOptimizerAdapter` around it."""
    if hasattr(optimizer, "tensors_and_states"):
        return optimizer  # type: ignore[return-value]  # torch's optimizers do not have it
    return TorchOptimizerAdapter(optimizer)
