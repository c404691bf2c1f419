"""Float32 master weights for a half-precision model under DDP or FSDP: mixed precision without ZeroOptimizer.

    step    master = optimizer(master, grad / scale);   parameter = master, rounded

An update smaller than 1/256 of a bfloat16 weight is rounded away when added to that weight, but not when added to the
master weight.
Source: Mixed Precision Training, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minipar.data_parallel.optimizer_interface import TorchOptimizerAdapter
from minipar.mesh import placement_of, set_placement
from minipar.train.optim import Group


class MasterWeights(TorchOptimizerAdapter):
    """An `OptimizerInterface` around an optimizer that updates a float32 copy of each parameter that is not float32.

    groups   parameter groups; `options` are passed to `make_optimizer`

    Holds 4 bytes per parameter that is not float32, besides the optimizer's state. Sends nothing.
    """

    def __init__(
        self, groups: list[Group], make_optimizer: type[torch.optim.Optimizer], **options: Any
    ) -> None:
        self.masters: dict[nn.Parameter, Tensor] = {
            p: _master(p) for group in groups for p in group["params"]
        }
        inner = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups]
        super().__init__(make_optimizer(inner, **options))

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, which have the gradients."""
        return list(self.masters)

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return ((master, self.optimizer.state[master]) for master in self.masters.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.masters:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        # Operations on whole lists: on a GPU, each of them is one kernel for all parameters.
        trained = [(p.grad, master) for p, master in self.masters.items() if p.grad is not None]
        gradients = [torch.empty_like(master) for _, master in trained]
        if trained:
            torch._foreach_copy_(gradients, [grad.as_subclass(Tensor) for grad, _ in trained])
            torch._foreach_div_(gradients, grad_scale)
        for (_, master), gradient in zip(trained, gradients):
            master.grad = gradient
        self.optimizer.step()
        rounded = [(p, master) for p, master in self.masters.items() if p is not master]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [master for _, master in rounded])
        for _, master in rounded:
            master.grad = None


def _master(param: nn.Parameter) -> Tensor:
    if param.dtype == torch.float32:
        return param
    master = param.detach().float().requires_grad_()
    set_placement(master, placement_of(param))
    return master
