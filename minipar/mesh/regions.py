"""Boxes: axis-aligned parts of a tensor, where a local tensor keeps them, how a flat range becomes boxes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """The elements from `start`, `length` of them along each dim."""

    start: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.length)

    def shifted(self, by: tuple[int, ...]) -> Box:
        return Box(tuple(s + b for s, b in zip(self.start, by)), self.length)

    def index(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """What to index a tensor with whose first element stands at `origin`."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, origin, self.length))

    def intersection(self, other: Box) -> Box:
        """What both hold; of length 0 along the dims where they don't meet."""
        start = tuple(map(max, self.start, other.start))
        stop = (min(s + n, t + m) for s, n, t, m in zip(*self, *other))
        return Box(start, tuple(max(0, e - s) for s, e in zip(start, stop)))


class Piece(NamedTuple):
    """One box of the global tensor, and where the local tensor keeps it.

    box     in the global tensor
    offset  None where the local tensor is the box, else where the box begins in the flat local tensor
    """

    box: Box
    offset: int | None

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """The box, a view of the global tensor."""
        return full[self.box.index((0,) * full.dim())]

    def of_local(self, local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """The box, or the given part of it, a view of the local tensor."""
        if self.offset is not None:
            local = local[self.offset : self.offset + self.box.numel].view(self.box.length)
        return local if box is None else local[box.index(self.box.start)]


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the range [start, stop) of a flattened tensor into boxes of it, in order: at most 2 * dims - 1.

    A range is the end of one row, then whole rows, then the beginning of another. Each of the two ends is a
    range of one row, and a row is a tensor of one dim less.
    """
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    (top, before), (bottom, after) = divmod(start, row), divmod(stop, row)
    if top == bottom:
        yield from _boxes_in_row(top, shape, before, after)
        return
    if before:
        yield from _boxes_in_row(top, shape, before, row)
        top += 1
    if top < bottom:
        yield Box((top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:]))
    yield from _boxes_in_row(bottom, shape, 0, after)


def _boxes_in_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.start), (1, *box.length))
