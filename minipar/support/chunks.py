"""Chunk sizes along a tensor dim, split as torch.chunk does throughout the library. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def chunk_sizes(length: int, count: int) -> list[int]:
    """Return `count` chunk sizes as torch.chunk has them, padded with zeros if it returns fewer: (5, 4) -> 2, 2, 1, 0."""
    size = -(-length // count)
    return [max(0, min(size, length - i * size)) for i in range(count)]


def bounds(sizes: Sequence[int]) -> list[int]:
    """Return the start of each chunk and the end of the last: 2, 2, 1 -> 0, 2, 4, 5."""
    return [0, *accumulate(sizes)]


def check_sizes(sizes: Sequence[int] | None, length: int, count: int, what: str, dim: int = 0) -> list[int]:
    """Return `sizes` as ints, or torch.chunk's sizes if None. Raises ValueError unless `count` sizes add up to `length`."""
    if sizes is None:
        return chunk_sizes(length, count)
    sizes = [int(s) for s in sizes]
    if len(sizes) != count or min(sizes) < 0 or sum(sizes) != length:
        raise ValueError(f"{what}={sizes} does not cut dim {dim} of length {length} into {count} parts")
    return sizes
