"""Per-element optimizers, which may update a shard of a parameter, since no element's update depends on other elements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minipar.mesh import placement_of
from minipar.support.errors import one_of

# The per-element classes of torch.optim. Not per element: Adafactor, Muon, LBFGS, SparseAdam.
ELEMENTWISE_OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
]


def require_per_element(optimizer_cls: Callable[..., torch.optim.Optimizer], per_element: bool) -> None:
    """Raise ValueError unless the optimizer can update a shard.

    An optimizer can update a shard if it updates each element independently (known by its class, or stated by
    `per_element`), or if it sums its norms over the shards itself.
    LAMB rescales a parameter's step by the parameter's norm, which a shard does not have: the squares must be summed over
    the ranks with the other shards, as `Lamb` does. Adafactor and Muon use whole rows and columns of a matrix.
    """
    if per_element or is_per_element(optimizer_cls):
        return
    raise ValueError(
        f"optimizer_cls={_name(optimizer_cls)} is not known to update each element from that element alone, which a shard "
        f"needs; use {one_of([*ELEMENTWISE_OPTIMIZERS, 'Lamb'])}, pass per_element=True if it does, or use "
        "WholeParameterZero, which cuts no parameter"
    )


def is_per_element(optimizer_cls: Callable[..., torch.optim.Optimizer]) -> bool:
    """Return whether the class is known to update per element, or sums its norms over shards itself."""
    known = {getattr(torch.optim, name) for name in ELEMENTWISE_OPTIMIZERS}
    return optimizer_cls in known or getattr(optimizer_cls, "sums_over_shards", False)


def watch_optimizers(fsdp: nn.Module, shards: Iterable[nn.Parameter], per_element: bool) -> None:
    """Watch every optimizer that steps with one of `shards`: its `state_dict` raises RuntimeError from then on.

    Unless `per_element`, the step raises ValueError if the optimizer is not known to be per-element.
    The check is a hook on every optimizer's step of this process, removed when `fsdp`, which owns the shards, is freed.
    """
    ids = {id(p) for p in shards}
    watched = weakref.WeakSet[torch.optim.Optimizer]()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in watched or not any(id(p) in ids for g in optimizer.param_groups for p in g["params"]):
            return
        if not per_element and not is_per_element(type(optimizer)):
            raise ValueError(
                f"{_name(type(optimizer))} is not known to update each element from that element alone, and FSDP's "
                f"parameters are flat shards; use {one_of(ELEMENTWISE_OPTIMIZERS)}, pass per_element=True to FSDP if it "
                "does, or use DDP or WholeParameterZero, which cut no parameter"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in ids):
            if any(
                isinstance(x, Tensor) and x.dim() and x.shape != p.shape
                for x in optimizer.state.get(p, {}).values()
            ):
                raise ValueError(
                    f"{_name(type(optimizer))} has state of {placement_of(p).name} from before FSDP sharded it; make the "
                    "optimizer after FSDP, from its parameters()"
                )
        optimizer.register_state_dict_pre_hook(_refuse_state_of_shards)
        watched.add(optimizer)

    weakref.finalize(fsdp, register_optimizer_step_pre_hook(check).remove).atexit = False


def _refuse_state_of_shards(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise RuntimeError(
        f"state_dict() of {_name(type(optimizer))} over FSDP's shards would be this rank's part alone; save the weights by "
        "full_state_dict() of the FSDP, and this state by optimizer_parts() and save() of the extra checkpoints.dcp, "
        "which any number of ranks can load"
    )


def _name(optimizer_cls: Callable[..., torch.optim.Optimizer]) -> str:
    return getattr(optimizer_cls, "__name__", repr(optimizer_cls))
