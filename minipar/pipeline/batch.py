"""A batch cut into microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.support.errors import require_divides


class Batch(NamedTuple):
    """This rank's part of a batch, microbatch by microbatch.

    inputs      each microbatch's inputs; empty if this rank does not hold the first stage
    targets     each microbatch's targets; empty if this rank does not hold the last stage
    per_sample  keyword arguments of the stages, by name and microbatch
    whole       keyword arguments that every microbatch gets unchanged
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    per_sample: dict[str, tuple[Tensor, ...]]
    whole: dict[str, Any]

    def kwargs(self, microbatch: int) -> dict[str, Any]:
        return {**self.whole, **{name: pieces[microbatch] for name, pieces in self.per_sample.items()}}


def split_batch(name: str, x: Tensor, m: int) -> tuple[Tensor, ...]:
    """Cut dim 0 into m equal parts. Raises ValueError if m does not divide it."""
    require_divides("num_microbatches", m, f"{name}.shape[0]", x.shape[0])
    return tuple(torch.split(x, x.shape[0] // m))
