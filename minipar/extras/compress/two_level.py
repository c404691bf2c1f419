"""The compressed mean in two levels: uncompressed inside a node, compressed across nodes, where the links are slow."""

from __future__ import annotations

from typing import Any

import torch

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.compressed_mean import CompressedMean
from minipar.extras.compress.plain_mean import Compressor, Means, State, Tensors, cut, fused, unfused, widened
from minipar.support.chunks import chunk_sizes
from minipar.support.errors import require_divides


class TwoLevelMean(Compressor):
    """Average over k nodes of g consecutive ranks. The result is bitwise equal on all ranks.

    reduce-scatter inside the node               (g-1)/g 4n bytes
    compressed mean of the chunk, across nodes   2 (k-1) B bytes, with B the codec's bytes for n/(gk) elements
    all-gather inside the node                   (g-1)/g 4n bytes

    Only the second phase uses the slow links, and only it has an error, which is fed back. With one node, this is a plain
    all-reduce.
    Raises ValueError if node_size does not divide the number of ranks.
    Sources: see compressed_mean.py; the two levels are as in minipar.comm.hierarchical.
    """

    def __init__(self, comm: Comm, codec: Codec, node_size: int, error_feedback: bool = True):
        require_divides("node_size", node_size, "the number of ranks", comm.size)
        node, place = divmod(comm.rank, node_size)
        self.comm = comm
        self.node = comm.subgroup(range(node * node_size, (node + 1) * node_size), "node of compression")
        self.across = comm.subgroup(range(place, comm.size, node_size), "across nodes of compression")
        self.mean = CompressedMean(self.across, codec, error_feedback)
        self._shapes: dict[tuple[Any, ...], Tensors] = {}
        self._loaded: State = {}

    def _means(self, tensors: Tensors) -> Means:
        group, flat = tuple(tensors), fused(tensors)
        if group not in self._shapes:
            self._begin(group, tensors)
        own = self.node.reduce_scatter(flat, "mean", algorithm="ring")
        if len(own):
            own = self.mean(own, group)
        return unfused(self.node.all_gather(own, self._sizes(tensors), algorithm="ring"), tensors)

    def _sizes(self, tensors: Tensors) -> list[int]:
        """Return the lengths of the chunks of the node's ranks."""
        return chunk_sizes(sum(x.numel() for x in tensors.values()), self.node.size)

    def state(self) -> State:
        """Return the state as `CompressedMean.state` does, gathered inside the node, since its ranks share one residual."""
        found, chunks = dict(self._loaded), self.mean.state()
        for group, shapes in self._shapes.items():
            sizes = self._sizes(shapes)
            for name in ("residual", "residual_of_mean") if self.across.size > 1 else ():
                like = next(iter(shapes.values()))
                nothing = torch.zeros(
                    sizes[self.node.rank], dtype=widened(like).dtype, device=self.comm.device
                )
                own = chunks.get(group, {}).get(name, nothing).to(nothing)
                for key, part in cut(self.node.all_gather(own, sizes, algorithm="ring"), shapes).items():
                    found.setdefault(key, {})[name] = part
        return found

    def load(self, state: State) -> None:
        self._loaded = dict(state)

    def _begin(self, group: tuple[Any, ...], tensors: Tensors) -> None:
        self._shapes[group] = {key: torch.empty_like(x, device="meta") for key, x in tensors.items()}
        states = {key: self._loaded.pop(key, {}) for key in group}
        own = {}
        for name in ("residual", "residual_of_mean"):
            if any(name in state for state in states.values()):
                whole = {key: states[key].get(name, torch.zeros_like(x)) for key, x in tensors.items()}
                own[name] = fused(whole).split(self._sizes(tensors))[self.node.rank]
        if own:
            self.mean.load({group: own})
