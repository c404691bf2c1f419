"""Layer-selective compression: some tensors are compressed; small or sensitive ones are averaged uncompressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.comm import Comm
from minipar.extras.compress.plain_mean import Compressor, Means, PlainMean, State, Tensors


class Selective(Compressor):
    """Average the tensors that `select(key)` chooses with the compressor `compress(comm)`, and the rest by one all-reduce.

    TAGC's code compresses the feed-forward and vocabulary matrices, and sends attention, position embeddings and norms
    uncompressed. `minipar train --compress tagc` compresses only the feed-forward matrices, so that a tied embedding stays
    exact. TAGC keeps the elements above a threshold, at least a fifth of them, and feeds back the rest. It sums sketches of
    the kept elements (see sketch.py), and a bit per element that says whether it was kept; here top-k sends values and
    indices.
    `select` must not choose a tensor of which several tensor-parallel ranks hold copies. Each copy would be encoded with
    different other elements, and the copies would drift apart.
    Sends 2(p-1)/p of the bytes of the tensors not chosen, and the compressor's messages for the chosen tensors.
    Source: layer-selective compression of TAGC, arXiv:2504.05638, as in its authors' code (ipolyakov/TAGC).
    """

    def __init__(self, comm: Comm, compress: Callable[[Comm], Compressor], select: Callable[[Any], bool]):
        self.comm, self.select = comm, select
        self.compressor, self.plain = compress(comm), PlainMean(comm)

    def means(self, tensors: Tensors) -> Means:
        chosen = {key: x for key, x in tensors.items() if self.select(key)}
        others = {key: x for key, x in tensors.items() if key not in chosen}
        found = self.compressor.means(chosen) | self.plain.means(others)
        return {key: found[key] for key in tensors}

    def state(self) -> State:
        return self.compressor.state()

    def load(self, state: State) -> None:
        self.compressor.load(state)
