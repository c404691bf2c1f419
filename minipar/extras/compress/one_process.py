"""The averages of `--compress`, computed in one process from the tensors of all ranks, without messages.

`minipar verify` compares a lossy run with these averages. They are the means that compressed_mean.py and power_sgd.py
compute; these files name the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.plain_mean import widened
from minipar.mesh import Placement
from minipar.support.chunks import chunk_sizes


class Average(NamedTuple):
    """One rank's record of one averaging over `ranks`: the tensors that this rank gave.

    comm  the name of the Comm: experts may have one of their own with the same ranks
    """

    comm: str
    ranks: tuple[int, ...]
    placements: list[Placement]
    given: list[Tensor]


class OneProcessMeans:
    """Computes the mean that each message gives, from the tensors of all ranks; keeps the ranks' residuals and factors.

    is_compressed  a function from a tensor's placement to whether it is compressed, or averaged exactly
    codec or rank  encodes a vector, or the rank of PowerSGD's factors
    """

    def __init__(
        self,
        is_compressed: Callable[[Placement], bool],
        codec: Codec | None = None,
        rank: int = 0,
    ):
        self.is_compressed, self.codec, self.rank = is_compressed, codec, rank
        self._residuals: dict[object, Tensor] = {}
        self._factors: dict[object, Tensor] = {}

    def __call__(self, message: Sequence[Average]) -> list[Tensor]:
        """Return the mean of each tensor of a message. `message` has the tensors of each rank of the Comm, in order."""
        first = message[0]
        given = [[widened(x) for x in one.given] for one in message]
        means = [torch.stack(xs).mean(0) for xs in zip(*given)]
        chosen = [i for i, x in enumerate(first.placements) if self.is_compressed(x)]
        key = (
            first.comm,
            first.ranks,
            tuple((first.placements[i].name, first.placements[i].part) for i in chosen),
        )
        if self.rank:
            for i in chosen:
                means[i] = self._by_powers((key, i), [xs[i] for xs in given])
        elif chosen:
            flat = self._two_phases(key, [torch.cat([xs[i].flatten() for i in chosen]) for xs in given])
            for i, part in zip(chosen, flat.split([means[i].numel() for i in chosen])):
                means[i] = part.view(means[i].shape)
        return [mean.to(x.dtype) for mean, x in zip(means, first.given)]

    def _two_phases(self, key: object, xs: list[Tensor]) -> Tensor:
        """Return the mean [n] of vectors [n]. Every rank sends chunk r to rank r, which sends its mean to all ranks."""
        means = []
        for r, own in enumerate(zip(*(x.split(chunk_sizes(len(x), len(xs))) for x in xs))):
            mean = torch.stack([self._sent((key, r, rank), x) for rank, x in enumerate(own)]).mean(0)
            means.append(self._sent((key, "mean", r), mean))
        return torch.cat(means)

    def _sent(self, key: object, x: Tensor) -> Tensor:
        """Encode and decode x plus the residual. Keep the error as the new residual."""
        if not len(x):
            return x
        assert self.codec is not None
        wanted = x + self._residuals.get(key, 0)
        sent = self.codec.decode(self.codec.encode(wanted), len(x))
        self._residuals[key] = wanted - sent
        return sent

    def _by_powers(self, key: object, xs: list[Tensor]) -> Tensor:
        shape, matrices = xs[0].shape, [x.flatten(1) for x in xs]
        n, m = matrices[0].shape
        if self.rank * (n + m) >= n * m:
            return torch.stack(xs).mean(0)
        if key not in self._factors:
            generator = torch.Generator().manual_seed(0)
            self._factors[key] = torch.randn(m, self.rank, generator=generator).to(matrices[0])
        wanted = [x + self._residuals.get((key, r), 0) for r, x in enumerate(matrices)]
        mean = torch.stack(wanted).mean(0)
        columns = torch.linalg.qr(mean @ self._factors[key]).Q
        self._factors[key] = mean.t() @ columns
        sent: Tensor = columns @ self._factors[key].t()
        for r, x in enumerate(wanted):
            self._residuals[key, r] = x - sent
        return sent.view(shape)
