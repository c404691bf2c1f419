"""A batch cut into microbatches, and these along the tokens into slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minipar.chunks import check_sizes
from minipar.errors import require_divides


class Batch(NamedTuple):
    """This rank's part of a batch: inputs[k] and targets[k] of unit k, per_sample[name][microbatch]; `whole` goes to all.

    A unit is a microbatch, or where samples are cut into slices one slice of it: k = microbatch * slices + slice.
    """

    inputs: tuple[Tensor, ...] | None
    targets: tuple[Tensor, ...] | None
    per_sample: dict[str, tuple[Tensor, ...]]
    whole: dict[str, Any]
    slices: int = 1

    def kwargs(self, unit: int) -> dict[str, Any]:
        pieces = {name: pieces[unit // self.slices] for name, pieces in self.per_sample.items()}
        return {**self.whole, **pieces}


def split_batch(name: str, x: Tensor, m: int) -> tuple[Tensor, ...]:
    """Cut dim 0 into m equal parts. Raises ValueError where m does not divide it."""
    require_divides("num_microbatches", m, f"{name}.shape[0]", x.shape[0])
    return x.split(x.shape[0] // m)


def split_units(name: str, x: Tensor, m: int, slices: int, sizes: Sequence[int] | None) -> tuple[Tensor, ...]:
    """Cut dim 0 into m microbatches, and dim 1 of each into slices of `sizes` tokens; return the units in order.

    sizes  None: as equal as they can be, larger ones first

    Raises ValueError as `split_batch`, where there are fewer tokens than slices, or where the sizes do not cut them.
    """
    microbatches = split_batch(name, x, m)
    if slices == 1:
        return microbatches
    length = x.shape[1]
    if length < slices:
        raise ValueError(
            f"slices={slices} are more than {name}.shape[1]={length} tokens; use {length} or fewer"
        )
    if sizes is None:
        sizes = [length // slices + (n < length % slices) for n in range(slices)]
    sizes = check_sizes(sizes, length, slices, "slice_sizes", dim=1)
    return tuple(unit for microbatch in microbatches for unit in microbatch.split(sizes, dim=1))
