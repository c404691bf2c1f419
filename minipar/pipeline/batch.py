"""A batch cut into microbatches, and microbatches cut along the tokens into slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.support.chunks import check_sizes
from minipar.support.errors import require_divides


class Batch(NamedTuple):
    """This rank's part of a batch, unit by unit. A unit is a microbatch or, where samples are cut, a slice of one.

    inputs      each unit's inputs; empty if this rank does not hold the first stage
    targets     each unit's targets; empty if this rank does not hold the last stage
    per_sample  keyword arguments of the stages, by name and microbatch
    whole       keyword arguments that every unit gets unchanged
    slices      number of slices per sample; unit k is slice k % slices of microbatch k // slices
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    per_sample: dict[str, tuple[Tensor, ...]]
    whole: dict[str, Any]
    slices: int = 1

    def kwargs(self, unit: int) -> dict[str, Any]:
        pieces = {name: pieces[unit // self.slices] for name, pieces in self.per_sample.items()}
        return {**self.whole, **pieces}


def split_batch(name: str, x: Tensor, m: int) -> tuple[Tensor, ...]:
    """Cut dim 0 into m equal parts. Raises ValueError if m does not divide it."""
    require_divides("num_microbatches", m, f"{name}.shape[0]", x.shape[0])
    return tuple(torch.split(x, x.shape[0] // m))


def split_units(name: str, x: Tensor, m: int, slices: int, sizes: Sequence[int] | None) -> tuple[Tensor, ...]:
    """Cut dim 0 into m microbatches, and dim 1 of each into slices of `sizes` tokens; return the units in order.

    sizes  None: slices as equal as possible, larger slices first

    Raises ValueError if `split_batch` does, if there are fewer tokens than slices, or if the sizes do not add up
    to the tokens.
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
    return tuple(unit for microbatch in microbatches for unit in torch.split(microbatch, sizes, dim=1))
