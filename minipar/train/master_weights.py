"""Float32 master weights of a half precision model, whose gradients DDP or FSDP reduces: mixed precision without ZeRO.

    step    master = optimizer(master, grad / scale);   parameter = master, rounded

Added to a bfloat16 weight, an update below 1/256 of it is rounded away; added to the master, it counts.
Source: Mixed Precision Training, arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minipar.data_parallel.optimizer_interface import TorchOptimizerAdapter
from minipar.mesh import placement_of, set_placement


class MasterWeights(TorchOptimizerAdapter):
    """`OptimizerInterface` of `make_optimizer` over float32 copies of those parameters that are not float32.

    groups   parameter groups; `options` are the optimizer's

    Holds, besides what the optimizer does, 4 bytes per parameter that is not float32. Sends nothing.
    """

    def __init__(self, groups: list[dict], make_optimizer: type[torch.optim.Optimizer], **options):
        self.masters: dict[nn.Parameter, Tensor] = {
            p: _master(p) for group in groups for p in group["params"]
        }
        inner = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups]
        super().__init__(make_optimizer(inner, **options))

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, which have the gradients."""
        return list(self.masters)

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        return ((master, self.optimizer.state[master]) for master in self.masters.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.masters:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0):
        # A few operations on lists, each one kernel for all parameters on a GPU.
        trained = [(p, master) for p, master in self.masters.items() if p.grad is not None]
        gradients = [torch.empty_like(master) for _, master in trained]
        if trained:
            torch._foreach_copy_(gradients, [p.grad.as_subclass(Tensor) for p, _ in trained])
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
