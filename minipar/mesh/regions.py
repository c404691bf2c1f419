"""Axis-aligned boxes of a tensor, their location in a local tensor, and the boxes that make up a flat range."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """The region that begins at `start` and has `length` elements along each dim."""

    start: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.length)

    def shifted(self, by: tuple[int, ...]) -> Box:
        return Box(tuple(s + b for s, b in zip(self.start, by)), self.length)

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor whose first element is at `origin`."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, origin, self.length))

    def intersection(self, other: Box) -> Box:
        """Return the common region, of length 0 along the dims where the boxes do not meet."""
        start = tuple(map(max, self.start, other.start))
        stop = (min(s + n, t + m) for s, n, t, m in zip(*self, *other))
        return Box(start, tuple(max(0, e - s) for s, e in zip(start, stop)))


class Piece(NamedTuple):
    """One box of the global tensor, and its location in the local tensor.

    box     in the global tensor
    offset  None if the local tensor is the box, else the index at which the box begins in the flat local tensor
    """

    box: Box
    offset: int | None

    def of_full(self, full: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the global tensor."""
        return full[self.box.slices((0,) * full.dim())]

    def of_local(self, local: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """Return the piece, or the part of it inside `box`, as a view of the local tensor."""
        if self.offset is not None:
            local = local.view(-1)[self.offset : self.offset + self.box.numel].view(self.box.length)
        return local if box is None else local[box.slices(self.box.start)]


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, in order, that make up the range [start, stop) of a flattened tensor: at most 2 * dims - 1.

    A range is the end of one row, then whole rows, then the beginning of another row. A row is a tensor of one dim
    less, so the two partial rows are cut recursively.
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
