"""Per-element optimizers, which may update a shard of a parameter, since no element's update depends on other elements."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    known = {getattr(torch.optim, name) for name in ELEMENTWISE_OPTIMIZERS}
    if per_element or optimizer_cls in known or getattr(optimizer_cls, "sums_over_shards", False):
        return
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    raise ValueError(
        f"optimizer_cls={name} is not known to update each element from that element alone, which a shard needs; use "
        f"{one_of([*ELEMENTWISE_OPTIMIZERS, 'Lamb'])}, pass per_element=True if it does, or use "
        "WholeParameterZero, which cuts no parameter"
    )
