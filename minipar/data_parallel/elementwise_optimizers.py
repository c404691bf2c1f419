"""Which optimizers may be handed a part of a parameter: those that update every element from that element alone."""

from __future__ import annotations

import torch

from minipar.errors import one_of

PER_ELEMENT = [
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
]  # of torch.optim; Adafactor, Muon, LBFGS and SparseAdam are not


def require_per_element(optimizer_cls, vouched_for: bool) -> None:
    """Raise ValueError for a class that may not be cut, unless it says itself that it adds its norms up over ranks.

    LAMB divides a parameter's step by that parameter's norm; of a part of it, the norm is another one. It must sum the
    squares over the ranks that have the other parts, as `Lamb` does. Adafactor and Muon use a matrix's rows and columns.
    """
    known = {getattr(torch.optim, name) for name in PER_ELEMENT}
    if optimizer_cls in known or vouched_for or getattr(optimizer_cls, "sums_over_shards", False):
        return
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    raise ValueError(
        f"optimizer_cls={name} is not known to update each element from that element alone, which a shard needs; "
        f"use {one_of([*PER_ELEMENT, 'Lamb'])}, or pass per_element=True if it does"
    )
