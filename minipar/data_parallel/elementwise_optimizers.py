"""Per-element optimizers, which may update a shard of a parameter, since no element's update depends on other elements."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


def refuse_whole_matrix_steps(fsdp: nn.Module, shards: Iterable[nn.Parameter]) -> None:
    """Make any optimizer's `step` raise ValueError if it has one of `shards` and is not known to be per-element.

    The check is a hook on every optimizer's step of this process, removed when `fsdp`, which owns the shards, is freed.
    """
    ids = {id(p) for p in shards}

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_per_element(type(optimizer)):
            return
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"{_name(type(optimizer))} is not known to update each element from that element alone, and FSDP's "
                f"parameters are flat shards; use {one_of(ELEMENTWISE_OPTIMIZERS)}, pass per_element=True to FSDP if it "
                "does, or use DDP or WholeParameterZero, which cut no parameter"
            )

    weakref.finalize(fsdp, register_optimizer_step_pre_hook(check).remove).atexit = False


def _name(optimizer_cls: Callable[..., torch.optim.Optimizer]) -> str:
    return getattr(optimizer_cls, "__name__", repr(optimizer_cls))
