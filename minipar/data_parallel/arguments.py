"""Checks of the arguments that DDP, ZeroOptimizer and FSDP have in common, and the errors that all of them raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.mesh import Placement, placement_of, set_placement
from minipar.support.errors import one_of

MIB = 2**20  # bytes

CommOf = Callable[[Tensor], Comm]  # parameter -> its Comm
ParamGroup = dict[str, Any]  # one of a torch optimizer's param_groups: "params", and options
MaybeComm = TypeVar("MaybeComm", Comm, Comm | None)

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


def function_of_parameter(comm: MaybeComm | Callable[[Tensor], MaybeComm]) -> Callable[[Tensor], MaybeComm]:
    """Return `comm` if it is a function from parameter to Comm, else a function that returns `comm` for any parameter."""
    return (lambda _: comm) if isinstance(comm, Comm | None) else comm


def bucket_sizes(bucket_mb: float, first_bucket_mb: float) -> tuple[int, int]:
    """Return the size limits of a bucket and of the first bucket, in bytes. Raises ValueError unless both are above 0."""
    if not bucket_mb > 0 or not first_bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
    return int(bucket_mb * MIB), int(first_bucket_mb * MIB)


def require_whole(params: Iterable[nn.Parameter], by: str) -> None:
    """Raise ValueError if a parameter already is FSDP's shard: rank 0's shard would overwrite the other ranks' shards."""
    for param in params:
        if placement_of(param).flat is not None:
            raise ValueError(
                f"{placement_of(param).name} is a shard made by FSDP, and {by} needs whole parameters; "
                "use one of the two: with FSDP, torch's own optimizer"
            )


def require_same_parameters(
    comm_of: CommOf, named: Iterable[tuple[str, Tensor]], extra: Mapping[str, object] = {}
) -> None:
    """Raise ValueError, on every rank, unless the ranks of each Comm have equal parameters or buffers in equal order.

    named   (name, tensor) pairs: names, shapes, dtypes, parts of split tensors, and which are trained, are compared
    extra   what else must be equal, such as options; what is printed with its address is not compared. Empty after
            construction, for parameters thawed or added since: if only some ranks have any, a deadlock says so

    Sends a digest of 16 bytes to each other rank of each Comm, and more only if digests differ.
    """
    by_comm: dict[Comm, dict[str, str]] = {}
    for name, x in named:
        entries = by_comm.setdefault(comm_of(x), {})
        entries[name] = f"{entries[name]}; {_described(x)}" if name in entries else _described(x)
    options = {name: value for name, value in extra.items() if " at 0x" not in str(value)}
    what = "parameters or options" if extra else "thawed or added parameters"
    for comm, entries in by_comm.items():
        advice = "give all ranks the same model and the same options"
        require_equal(comm, what, {**options, **entries}, advice)


def _described(x: Tensor) -> str:
    place: Placement | None = getattr(x, "placement", None)
    split = place is not None and place.local_shape != place.global_shape
    part = f" of {place.global_shape} at {place.rows or place.start}" if place is not None and split else ""
    return f"{tuple(x.shape)}{part} {x.dtype} {'trained' if x.requires_grad else 'frozen'}"


def require_per_element(optimizer_cls: Callable[..., torch.optim.Optimizer], per_element: bool) -> None:
    """Raise ValueError unless the optimizer can update a shard.

    An optimizer can update a shard if it updates each element independently (known by its class, or stated by
    `per_element`), or if it sums its norms over the shards itself.
    LAMB rescales a parameter's step by the parameter's norm, which a shard does not have: the squares must be summed over
    the ranks with the other shards, as `Lamb` does. Adafactor and Muon use whole rows and columns of a matrix.
    """
    if per_element or is_per_element(optimizer_cls):
        return
    name = getattr(optimizer_cls, "__name__", repr(optimizer_cls))
    raise ValueError(
        f"optimizer_cls={name} is not known to update each element from that element alone, which a shard "
        f"needs; use {one_of([*ELEMENTWISE_OPTIMIZERS, 'Lamb'])}, pass per_element=True if it does, or use "
        "WholeParameterZero, which cuts no parameter"
    )


def is_per_element(optimizer_cls: Callable[..., torch.optim.Optimizer]) -> bool:
    """Return whether the class is known to update per element, or sums its norms over shards itself."""
    known = {getattr(torch.optim, name) for name in ELEMENTWISE_OPTIMIZERS}
    return optimizer_cls in known or getattr(optimizer_cls, "sums_over_shards", False)


def place_by_number(groups: list[ParamGroup]) -> None:
    """Give each parameter without a Placement an unsharded one, named by its group's `param_names`, else "parameter N"."""
    number = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {number + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"]):
            if getattr(param, "placement", None) is None:
                set_placement(param, Placement.whole(name, param.shape))
        number += len(group["params"])


def refuse_copy(what: str, instead: str) -> NoReturn:
    raise TypeError(f"{what} cannot be copied or pickled, since its ranks communicate; {instead}")
