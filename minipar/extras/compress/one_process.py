"""The averages of `--compress`, computed in one process from the tensors of all ranks, without messages.

`minipar verify` compares a lossy run with these averages. They are the means that compressed_mean.py, two_level.py,
sketched_mean.py and power_sgd.py compute; these files name the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.plain_mean import widened
from minipar.extras.compress.sketch import Sketch, num_cells
from minipar.extras.compress.threshold import Choose
from minipar.mesh import Placement


class Average(NamedTuple):
    """One rank's record of one averaging: the tensors that this rank gave, and the means that all `ranks` got.

    comm           the name of the Comm: experts may have one of their own with the same ranks
    is_compressed  False for a plain mean
    cuts           None, or for each rank the ranges (from, to) of the flattened tensors whose mean only that rank got
    """

    comm: str
    ranks: tuple[int, ...]
    is_compressed: bool
    placements: list[Placement]
    given: list[Tensor]
    got: list[Tensor]
    cuts: list[list[tuple[int, int]]] | None = None


class Sketched(NamedTuple):
    """The settings of a SketchedMean: which elements a rank keeps, and the number of cells per element."""

    choose: Choose
    ratio: float


class OneProcessMeans:
    """Computes the mean that each message gives, from the tensors of all ranks; keeps the ranks' residuals and factors.

    is_compressed  a function from a tensor's placement to whether it is compressed, or averaged exactly
    codec          encodes a vector; None for PowerSGD; `Sketched` for the sketches of the largest elements
    node_size      compress only between nodes of this many ranks; None: between all ranks
    rank           the rank of PowerSGD's factors
    feedback       True: error feedback, which adds a codec's error to the next vector
    """

    def __init__(
        self,
        is_compressed: Callable[[Placement], bool],
        codec: Codec | Sketched | None,
        node_size: int | None = None,
        rank: int = 0,
        feedback: bool = True,
    ):
        self.is_compressed, self.codec, self.node_size, self.rank = is_compressed, codec, node_size, rank
        self.feedback = feedback
        self._residuals: dict[object, Tensor] = {}
        self._factors: dict[object, Tensor] = {}

    def __call__(self, message: Sequence[Average]) -> list[Tensor]:
        """Return the mean of each tensor of a message. `message` has the tensors of each rank of the Comm, in order."""
        first = message[0]
        given = [[widened(x) for x in one.given] for one in message]
        means = [torch.stack(xs).mean(0) for xs in zip(*given)]
        chosen = [i for i, x in enumerate(first.placements) if first.is_compressed and self.is_compressed(x)]
        key = (
            first.comm,
            first.ranks,
            tuple((first.placements[i].name, first.placements[i].part) for i in chosen),
        )
        if self.codec is None:
            for i in chosen:
                means[i] = self._by_powers((key, i), [xs[i] for xs in given])
        elif first.cuts is not None:
            for r, cuts in enumerate(first.cuts):
                self._scatter((key, r), [(i, cuts[i]) for i in chosen], given, means)
        elif chosen:
            flat = self._by_codec(key, [torch.cat([xs[i].flatten() for i in chosen]) for xs in given])
            for i, part in zip(chosen, flat.split([means[i].numel() for i in chosen])):
                means[i] = part.view(means[i].shape)
        return [mean.to(x.dtype) for mean, x in zip(means, first.given)]

    def _scatter(
        self,
        key: object,
        pieces: list[tuple[int, tuple[int, int]]],
        given: list[list[Tensor]],
        means: list[Tensor],
    ) -> None:
        """Put the means of the pieces of one rank into `means`; all ranks encode and send these pieces to that rank.

        A piece is (i, (low, high)): elements low to high - 1 of tensor i.
        """
        pieces = [(i, (low, high)) for i, (low, high) in pieces if high > low]
        if not pieces:
            return
        vectors = [torch.cat([xs[i].flatten()[low:high] for i, (low, high) in pieces]) for xs in given]
        mean = self._to_one_rank(key, vectors, len(vectors[0]))
        for (i, (low, high)), part in zip(pieces, mean.split([high - low for _, (low, high) in pieces])):
            means[i].view(-1)[low:high] = part

    def _by_codec(self, key: object, xs: list[Tensor]) -> Tensor:
        if isinstance(self.codec, Sketched):
            chunks = zip(*(x.split(-(-len(x) // len(xs))) for x in xs))
            return torch.cat([self._to_one_rank((key, r), list(own), 0) for r, own in enumerate(chunks)])
        if self.node_size is None:
            return self._two_phases(key, xs)
        g, n = self.node_size, len(xs[0])
        nodes = [torch.stack(xs[i : i + g]).mean(0) for i in range(0, len(xs), g)]
        if len(nodes) == 1:
            return nodes[0]
        chunk = -(-n // g)
        parts = [[x[start : start + chunk] for x in nodes] for start in range(0, n, chunk)]
        return torch.cat([self._two_phases((key, i), part) for i, part in enumerate(parts)])

    def _two_phases(self, key: object, xs: list[Tensor]) -> Tensor:
        """Return the mean [n] of vectors [n]. Every rank sends chunk r to rank r, which sends its mean to all ranks."""
        p, total = len(xs), len(xs[0])
        n = -(-total // p)
        means = []
        for chunk in range(p):
            held = min(max(total - chunk * n, 0), n)
            own = [F.pad(x, (0, n * p - total))[chunk * n : (chunk + 1) * n] for x in xs]
            mean = self._to_one_rank((key, chunk), own, held)
            means.append(self._sent((key, "mean", chunk), mean, held))
        return torch.cat(means)[:total]

    def _to_one_rank(self, key: object, xs: list[Tensor], held: int) -> Tensor:
        """Return the mean of what all ranks send to one of them, of vectors with padding after `held` elements.

        Of a sketch, that is the elements that are chosen and recovered; the others are kept as residuals.
        """
        if not isinstance(self.codec, Sketched):
            return torch.stack([self._sent((key, rank), x, held) for rank, x in enumerate(xs)]).mean(0)
        wanted = [x + self._residuals.get((key, rank), 0) for rank, x in enumerate(xs)]
        chosen = [self.codec.choose(x) for x in wanted]
        places = torch.stack(chosen).any(0)
        recovered = Sketch(places, num_cells(len(places), self.codec.ratio)).recovered
        sent = [x * (mask & recovered) for x, mask in zip(wanted, chosen)]
        if self.feedback:
            self._residuals |= {(key, rank): x - y for rank, (x, y) in enumerate(zip(wanted, sent))}
        return torch.stack(sent).mean(0)

    def _sent(self, key: object, x: Tensor, held: int) -> Tensor:
        """Encode and decode x plus the residual. Keep the error as the new residual, with 0 in the padding after `held`."""
        assert self.codec is not None
        assert not isinstance(self.codec, Sketched)
        wanted = x + self._residuals.get(key, 0)
        sent = self.codec.decode(self.codec.encode(wanted), len(x))
        if self.feedback:
            self._residuals[key] = wanted - sent
            self._residuals[key][held:] = 0
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
