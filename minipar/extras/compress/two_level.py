"""The compressed mean in two levels: uncompressed inside a node, compressed across nodes, where the links are slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import Codec
from minipar.extras.compress.compressed_mean import CompressedMean
from minipar.extras.compress.plain_mean import Means, State, Tensors, cut, fused, unfused, widened
from minipar.support.errors import require_divides


class TwoLevelMean:
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

    def __call__(self, x: Tensor, key: object = 0) -> Tensor:
        return self.means({key: x})[key]

    @torch.no_grad()
    def means(self, tensors: Tensors) -> Means:
        """Return the mean over ranks of each tensor, all in one message; see plain_mean.py."""
        if self.comm.size == 1 or not tensors:
            return dict(tensors)
        group, flat = tuple(tensors), fused(tensors)
        if group not in self._shapes:
            self._begin(group, tensors, flat)
        own = self.node.reduce_scatter(self._padded(flat), "mean", algorithm="ring")
        held = self._held(len(flat))
        if held:
            own[:held] = self.mean(own[:held], group)
        return unfused(self.node.all_gather(own, algorithm="ring")[: len(flat)], tensors)

    def _held(self, n: int) -> int:
        """Return the number of elements in this rank's chunk of n; the rest of the chunk is padding."""
        chunk = -(-n // self.node.size)
        return min(max(n - self.node.rank * chunk, 0), chunk)

    def _padded(self, flat: Tensor) -> Tensor:
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.node.size))

    def sent_bytes(self, n: int) -> int:
        """Return the bytes that a rank sends, inside the node and across nodes, for a vector of n float32 elements."""
        g = self.node.size
        return 2 * (g - 1) * 4 * -(-n // g) + self.mean.sent_bytes(self._held(n))

    def state(self) -> State:
        """Return the state as `CompressedMean.state` does, gathered inside the node, since its ranks share one residual."""
        found, chunks = dict(self._loaded), self.mean.state()
        for group, shapes in self._shapes.items():
            length = sum(x.numel() for x in shapes.values())
            for name in ("residual", "residual_of_mean") if self.across.size > 1 else ():
                dtype = widened(next(iter(shapes.values()))).dtype  # also where this rank's chunk is empty
                own = torch.zeros(-(-length // self.node.size), dtype=dtype, device=self.comm.device)
                x = chunks.get(group, {}).get(name, own[:0])
                own[: len(x)] = x
                for key, part in cut(self.node.all_gather(own, algorithm="ring"), shapes).items():
                    found.setdefault(key, {})[name] = part
        return found

    def load(self, state: State) -> None:
        self._loaded = dict(state)

    def _begin(self, group: tuple[Any, ...], tensors: Tensors, like: Tensor) -> None:
        self._shapes[group] = {key: torch.empty_like(x, device="meta") for key, x in tensors.items()}
        states = {key: self._loaded.pop(key, {}) for key in group}
        own = {}
        for name in ("residual", "residual_of_mean"):
            if any(name in state for state in states.values()):
                whole = {key: states[key].get(name, torch.zeros_like(x)) for key, x in tensors.items()}
                chunk = self._padded(fused(whole)).chunk(self.node.size)[self.node.rank]
                own[name] = chunk[: self._held(len(like))]
        if own:
            self.mean.load({group: own})
