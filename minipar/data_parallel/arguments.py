"""Arguments that DDP, ZeroOptimizer and FSDP have in common, and what they all refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.errors import one_of
from minipar.mesh import Placement, placement_of, set_placement

MIB = 2**20  # bytes


def function_of_parameter(comm: Comm | Callable | None) -> Callable[[Tensor], Comm | None]:
    """Return a function from parameter to Comm: `comm` itself, or one that returns `comm` for every parameter."""
    return (lambda _: comm) if isinstance(comm, Comm | None) else comm


def require_reduce(reduce: str) -> None:
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")


def bucket_sizes(bucket_mb: float, first_bucket_mb: float) -> tuple[int, int]:
    """Return the two limits in bytes. Raises ValueError unless both are above 0."""
    if not bucket_mb > 0 or not first_bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
    return int(bucket_mb * MIB), int(first_bucket_mb * MIB)


def require_whole(params: Iterable[nn.Parameter], by: str) -> None:
    """Raise ValueError where a parameter is already a shard over the ranks: ranks would be given each other's shards."""
    for param in params:
        if placement_of(param).flat is not None:
            raise ValueError(
                f"{placement_of(param).name} is a shard made by FSDP, and {by} needs whole parameters; "
                "use one of the two: with FSDP, torch's own optimizer"
            )


def place_by_number(groups: list[dict]) -> None:
    """Give each parameter without a Placement one, under its name in its group or, where it has none, its number."""
    number = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {number + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"]):
            if getattr(param, "placement", None) is None:
                set_placement(param, Placement.whole(name, param.shape))
        number += len(group["params"])


def refuse_copy(what: str, instead: str):
    raise TypeError(f"{what} cannot be copied or pickled, since its ranks communicate; {instead}")
