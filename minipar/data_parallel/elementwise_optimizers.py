"""The optimizers that may update a shard of a parameter: those that update each element from that element alone."""

from __future__ import annotations

import torch

from minipar.errors import one_of

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
]  # of torch.optim; not per element: Adafactor, Muon, LBFGS, SparseAdam


def require_per_element(optimizer_cls, per_element: bool) -> None:
    """Raise ValueError unless the class updates per element, is vouched for, or sums its norms over shards itself.

    LAMB rescales a parameter's step by the parameter's norm, and a shard has another norm: the squares must be summed
    over the ranks with the other shards, as `Lamb` does. Adafactor and Muon use whole rows and columns of a matrix.
    """
    known = {getattr(torch.optim, name) for name in ELEMENTWISE_OPTIMIZERS}
    if optimizer_cls in known or per_element or getattr(optimizer_cls, "sums_over_shards", False):
        return
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    raise ValueError(
        f"optimizer_cls={name} is not known to update each element from that element alone, which a shard needs; "
        f"use {one_of([*ELEMENTWISE_OPTIMIZERS, 'Lamb'])}, pass per_element=True if it does, or use "
        "WholeParameterZero, which cuts no parameter"
    )
