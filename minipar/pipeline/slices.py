"""Keys and values that a stage keeps between the slices of a sample, and the gradients that later slices have of them.

`minipar.schedules.sequence_slices` says in which order slices run; here is how one slice's attention sees the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minipar.model import Transformer
from minipar.model.groups import check_whole_groups


class SequenceSlices:
    """The keys and values that a stage's attentions have computed for the slices of each microbatch under way.

    k_n, v_n  [b, H/g, t, head_dim]    one attention's, of slice n with t tokens; under tp, of the heads of this rank

    forward of slice n     K = [k_0 ... k_n], V = [v_0 ... v_n]    its queries, the last t tokens, see these causally
    backward of slice n    (dout, dk_n, dv_n) -> dx and the weights' gradients; to dk_i and dv_i, i < n, its own are added
                           dk_n and dv_n are the sums over slices n+1 ..., whose backwards ran before

    A slice has as many tokens as its input; its positions and indices go on from the slice before. A forward that is
    recomputed in the backward (activation checkpointing) reads the same keys and values, and keeps nothing again.

    Keeps k_n and v_n from the forward to the end of the backward of slice n. Besides, attention keeps every slice's K and V
    for its backward: for s equal slices, (s+1)/2 times the keys and values of whole samples. Sends nothing.
    Raises ValueError for a stage that reads a part of every sample already (context parallelism).
    """

    def __init__(self, transformer: Transformer, slices: int):
        if transformer.overrides.default_positions is not None:
            raise ValueError(
                f"slices={slices}: default_positions has been replaced, so this stage reads a part of every sample "
                "(context parallelism); use stages that read all of it"
            )
        self.slices, self._transformer = slices, transformer
        self._attentions = [layer.attention for layer in transformer.layers.values()]
        self._kept: dict[int, list[list[_KeysAndValues]]] = {}  # microbatch -> of each attention, by slice

    @contextmanager
    def visible(self, unit: int) -> Iterator[None]:
        """Let the attentions see the earlier slices: in the forward of a unit, and in its backward, which may recompute."""
        microbatch, n = divmod(unit, self.slices)
        kept = self._kept.setdefault(microbatch, [[] for _ in self._attentions])
        for attention, own in zip(self._attentions, kept):
            attention.overrides.cache = _EarlierSlices(own, n)
        self._transformer.overrides.default_positions = partial(self._positions, self._start(unit))
        try:
            yield
        finally:
            for attention in self._attentions:
                attention.overrides.cache = None
            self._transformer.overrides.default_positions = None

    def cut(self, kwargs: dict, x: Tensor, unit: int) -> dict:
        """Replace the positions of whole samples, [T] or [b, T], by those of the unit's tokens; `x` is its input."""
        if kwargs.get("positions") is None:
            return kwargs
        start = self._start(unit)
        end = start + self._transformer.sequence_length(x)
        return {**kwargs, "positions": kwargs["positions"][..., start:end]}

    def gradients(self, unit: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the places in its graph of a unit's keys and values, and the gradients that later slices have of them."""
        microbatch, n = divmod(unit, self.slices)
        read = [x for own in self._kept[microbatch] for x in own[n] if x.leaf.grad is not None]
        return [x.edge for x in read], [x.leaf.grad for x in read]

    def release(self, unit: int) -> None:
        """Drop what is kept of a unit after its backward, and of the whole microbatch after that of its first slice."""
        microbatch, n = divmod(unit, self.slices)
        if n:
            for own in self._kept[microbatch]:
                del own[n:]
        else:
            del self._kept[microbatch]

    def clear(self) -> None:
        self._kept = {}

    def _start(self, unit: int) -> int:
        """The index of the unit's first token in its sample."""
        microbatch, n = divmod(unit, self.slices)
        return sum(kept.keys.leaf.shape[2] for own in self._kept[microbatch][:1] for kept in own[:n])

    def _positions(self, start: int, T: int, device) -> Tensor:
        positions = torch.arange(start, start + T, device=device)
        if self._transformer.config.num_experts:
            check_whole_groups(positions, self._transformer.config.group_tokens)
        return positions


class _Kept(NamedTuple):
    """A tensor of a slice: its place in the slice's graph, and a leaf, which later slices read and give a gradient."""

    edge: GradientEdge | None
    leaf: Tensor


class _KeysAndValues(NamedTuple):
    keys: _Kept
    values: _Kept


def _kept(x: Tensor) -> _Kept:
    return _Kept(
        get_gradient_edge(x) if x.requires_grad else None, x.detach().requires_grad_(x.requires_grad)
    )


class _EarlierSlices:
    """The `cache` of one attention while it computes slice n: `kept` holds its keys and values by slice."""

    def __init__(self, kept: list[_KeysAndValues], n: int):
        self._kept, self._n = kept, n

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the slice's keys and values [b, H/g, t, head_dim]; return those of slices 0 ... n, [b, H/g, S, head_dim]."""
        if len(self._kept) == self._n:  # else it is computed again, in the backward
            self._kept.append(_KeysAndValues(_kept(k), _kept(v)))
        earlier = self._kept[: self._n]
        if not earlier:
            return k, v
        keys, values = (x.keys.leaf for x in earlier), (x.values.leaf for x in earlier)
        return torch.cat((*keys, k), dim=2), torch.cat((*values, v), dim=2)
