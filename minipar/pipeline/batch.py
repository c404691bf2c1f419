"""A batch cut into microbatches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from minipar.errors import require_divides


class Batch(NamedTuple):
    """This rank's part of a batch, by microbatch k: inputs[k], targets[k], per_sample[name][k]; `whole` goes to every k."""

    inputs: tuple[Tensor, ...] | None
    targets: tuple[Tensor, ...] | None
    per_sample: dict[str, tuple[Tensor, ...]]
    whole: dict[str, Any]

    def kwargs(self, microbatch: int) -> dict[str, Any]:
        return {**self.whole, **{name: pieces[microbatch] for name, pieces in self.per_sample.items()}}


def split_batch(name: str, x: Tensor, m: int) -> tuple[Tensor, ...]:
    require_divides("num_microbatches", m, f"{name}.shape[0]", x.shape[0])
    return x.split(x.shape[0] // m)
