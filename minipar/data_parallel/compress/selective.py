"""Layer-selective compression: some tensors compressed, the others, small or precious, sent as they are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minipar.data_parallel.compress.plain_mean import PlainMean


class Selective:
    """The means of the tensors that `select(key)` chooses by `compress(comm)`, those of the others by one all-reduce.

    TAGC's code compresses the feed-forward matrices and the vocabulary's, and sends attention, position embeddings and
    norms as they are. `minipar train --compress tagc` chooses the feed-forward matrices alone, whose gradients no other
    layer shares: a tied embedding stays exact. TAGC keeps about the largest fifth by a threshold, and feeds back the rest;
    it sums a sketch of them, and one bit an element that says which there are. With top-k inside, values and indices go.
    Where two tensor-parallel ranks hold copies of a tensor, it must not be chosen: each would be rounded together with
    other neighbours, and the copies drift apart.
    Sends 2(p-1)/p of the bytes of the tensors not chosen, and what the compressor sends for the others.
    Source: layer-selective compression of TAGC, arXiv:2504.05638, read in its authors' code (ipolyakov/TAGC).
    """

    def __init__(self, comm, compress: Callable, select: Callable[[object], bool]):
        self.comm, self.select = comm, select
        self.compressor, self.plain = compress(comm), PlainMean(comm)

    def __call__(self, x: Tensor, key=0) -> Tensor:
        return self.means({key: x})[key]

    def means(self, tensors: dict) -> dict:
        chosen = {key: x for key, x in tensors.items() if self.select(key)}
        others = {key: x for key, x in tensors.items() if key not in chosen}
        found = self.compressor.means(chosen) | self.plain.means(others)
        return {key: found[key] for key in tensors}

    def state(self) -> dict:
        return self.compressor.state()

    def load(self, state: dict) -> None:
        self.compressor.load(state)
