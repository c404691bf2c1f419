"""How a tensor is cut among ranks, and how two contributions are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from minipar.errors import one_of


def chunk_sizes(length: int, count: int) -> list[int]:
    """`length` cut as torch.chunk cuts it, with empty chunks where it would return fewer: 5 by 4 -> 2, 2, 1, 0."""
    size = -(-length // count)
    return [max(0, min(size, length - i * size)) for i in range(count)]


def bounds(sizes: Sequence[int]) -> list[int]:
    """Where each chunk starts, and where the last one ends: 2, 2, 1 -> 0, 2, 4, 5."""
    return [0, *accumulate(sizes)]


def check_sizes(sizes: Sequence[int] | None, length: int, count: int, what: str, dim: int = 0) -> list[int]:
    """The given sizes, or torch.chunk's, after checking that they cut `length` into `count` parts."""
    if sizes is None:
        return chunk_sizes(length, count)
    sizes = [int(s) for s in sizes]
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != length:
        raise ValueError(f"{what}={sizes} does not cut dim {dim} of length {length} into {count} parts")
    return sizes


class Reduction(NamedTuple):
    """combine(a, b, out=...) for two contributions; `divide` by the number of ranks at the end."""

    combine: Callable
    native: str  # torch.distributed's name for it
    divide: bool


REDUCTIONS = {
    "sum": Reduction(torch.add, "SUM", False),
    "mean": Reduction(torch.add, "SUM", True),
    "max": Reduction(torch.maximum, "MAX", False),
    "min": Reduction(torch.minimum, "MIN", False),
}


def reduction(op: str, dtype: torch.dtype) -> Reduction:
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} is not a reduction; use {one_of(REDUCTIONS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"op='mean' needs a floating point tensor, not {dtype}; use sum")
    return REDUCTIONS[op]
