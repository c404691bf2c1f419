"""A pipeline whose microbatches are cut into slices of tokens; `sequence_slices.py` has the order in which they run.

A stage keeps the keys and values of a sample's earlier slices, and their gradients from its later slices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minipar.comm import Comm
from minipar.extras.schedules.sequence_slices import SlicedSchedule
from minipar.model import Transformer
from minipar.model.attention import Attention
from minipar.model.block import Block
from minipar.model.groups import check_whole_groups
from minipar.pipeline import Pipeline
from minipar.pipeline.mailbox import Mailbox
from minipar.pipeline.stage import Stage
from minipar.schedules.schedule import Action
from minipar.support.chunks import check_sizes


class SlicedPipeline(Pipeline):
    """The `Pipeline` of a SlicedSchedule; its stages are Transformers, and it has no `loss_fn`, since means do not add up.

    Gradients equal those of one process up to rounding, since attention adds them up slice by slice. Sends what a Pipeline
    sends, and 80 bytes once for the shape of each slice.
    """

    runs = SlicedSchedule
    schedule: SlicedSchedule

    def _make_mailbox(self) -> Mailbox:
        return SlicedMailbox(self.comm, self.schedule)

    def _make_stage(self, *plain: Any) -> Stage:
        slices = self.schedule.slices
        if self.loss_fn is not None:
            raise ValueError(f"slices={slices} with a loss_fn: means do not add up; use loss_fn=None")
        return SlicedStage(slices, *plain)

    def _cut_tokens(self, name: str, x: Tensor | None) -> tuple[Tensor, ...]:
        """Cut dim 0 into microbatches, and dim 1 of each into slices; return the units in order."""
        slices = self.schedule.slices
        microbatches = super()._cut_tokens(name, x)[::slices]
        length = microbatches[0].shape[1]
        if length < slices:
            raise ValueError(
                f"slices={slices} are more than {name}.shape[1]={length} tokens; use {length} or fewer"
            )
        sizes = self.schedule.sizes or [length // slices + (n < length % slices) for n in range(slices)]
        sizes = check_sizes(sizes, length, slices, "slice_sizes", dim=1)
        return tuple(unit for microbatch in microbatches for unit in torch.split(microbatch, sizes, dim=1))

    def _cut_samples(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        """Cut dim 0 into microbatches, and return each once per slice."""
        microbatches = super()._cut_samples(name, x)
        return tuple(microbatch for microbatch in microbatches for _ in range(self.schedule.slices))


class SlicedMailbox(Mailbox):
    """A mailbox in which each slice of a sample has a shape of its own."""

    def __init__(self, comm: Comm, schedule: SlicedSchedule):
        self._slices = schedule.slices
        super().__init__(comm, schedule)

    def _boundary(self, action: Action) -> Hashable:
        return super()._boundary(action), action.microbatch % self._slices


class SlicedStage(Stage):
    """A stage whose attention sees a sample's earlier slices; it numbers its units, as a SlicedSchedule does."""

    def __init__(self, slices: int, *plain: Any, **options: Any):
        super().__init__(*plain, **options)
        if self.transformer is None:
            raise ValueError(
                f"slices={slices} of a sample on stage {self.number}, a {type(self.module).__name__}; use a Transformer, "
                "whose attentions can see earlier slices"
            )
        self._slices = SequenceSlices(self.transformer, slices)

    def forward(
        self, k: int, x: Tensor, kwargs: dict[str, Any], finish: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        with self._slices.visible(k):
            out = super().forward(k, x, self._slices.cut(kwargs, x, k), finish)
        num_slices = self._slices.slices
        if not torch.is_grad_enabled() and (k + 1) % num_slices == 0:
            self._slices.release(k + 1 - num_slices)
        return out

    def backward(self, k: int, gradient: Tensor) -> Tensor | None:
        of_input = super().backward(k, gradient)
        self._slices.release(k)
        return of_input

    def end(self) -> None:
        super().end()
        self._slices.clear()

    def _sample_ids(self, k: int, x: Tensor) -> Tensor:
        return super()._sample_ids(k // self._slices.slices, x)

    def _backpropagate(self, k: int, edge: GradientEdge, gradient: Tensor) -> None:
        edges, gradients = self._slices.gradients(k)
        with self._slices.visible(k):
            torch.autograd.backward((edge, *edges), (gradient, *gradients))


class SequenceSlices:
    """The keys and values that a stage's attention layers have computed for the slices of each microbatch under way.

    k_n, v_n  [b, H/g, t, head_dim]    one attention layer's keys and values for slice n, of t tokens; with tp, of this
                                       rank's heads

    forward of slice n     K = [k_0 ... k_n], V = [v_0 ... v_n]    the slice's queries attend to these causally
    backward of slice n    (dout, dk_n, dv_n) -> dx and the weights' gradients; adds its terms to dk_i and dv_i, i < n.
                           dk_n and dv_n are the sums over slices n+1 ..., whose backwards ran earlier

    The positions of a slice's tokens continue from the previous slice. A forward that is recomputed in the backward
    (activation checkpointing) uses the stored keys and values, and does not store its own again.

    Keeps k_n and v_n from the forward to the end of the backward of slice n. In addition, attention keeps every slice's K
    and V for its backward: for s equal slices, (s+1)/2 times the keys and values of whole samples. Sends nothing.
    Raises ValueError for a stage that has only a part of every sample (context parallelism).
    """

    def __init__(self, transformer: Transformer, slices: int):
        if transformer.overrides.default_positions is not None:
            raise ValueError(
                f"slices={slices}: default_positions has been replaced, so this stage reads a part of every sample "
                "(context parallelism); use stages that read all of it"
            )
        self.slices, self._transformer = slices, transformer
        self._attentions: list[Attention] = []
        for layer in transformer.layers.values():
            assert isinstance(layer, Block)
            self._attentions.append(layer.attention)
        # microbatch -> for each attention layer -> its keys and values by slice
        self._kept: dict[int, list[list[_KeysAndValues]]] = {}

    @contextmanager
    def visible(self, unit: int) -> Iterator[None]:
        """Let attention attend to the earlier slices. Used around a unit's forward and, as it may recompute, its backward.

        A unit is a slice of a microbatch.
        """
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

    def cut(self, kwargs: dict[str, Any], x: Tensor, unit: int) -> dict[str, Any]:
        """Cut the positions of whole samples, [T] or [b, T], down to the unit's tokens; `x` is the unit's input."""
        if kwargs.get("positions") is None:
            return kwargs
        start = self._start(unit)
        end = start + self._transformer.sequence_length(x)
        return {**kwargs, "positions": kwargs["positions"][..., start:end]}

    def gradients(self, unit: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the autograd edges of a unit's keys and values, and their gradients accumulated from later slices."""
        microbatch, n = divmod(unit, self.slices)
        kept = [x for own in self._kept[microbatch] for x in own[n]]
        read = [(x.edge, x.leaf.grad) for x in kept if x.edge is not None and x.leaf.grad is not None]
        return [edge for edge, _ in read], [grad for _, grad in read]

    def release(self, unit: int) -> None:
        """Drop a unit's keys and values after its backward; after the first slice's, drop all state of the microbatch."""
        microbatch, n = divmod(unit, self.slices)
        if n:
            for own in self._kept[microbatch]:
                del own[n:]
        else:
            del self._kept[microbatch]

    def clear(self) -> None:
        self._kept = {}

    def _start(self, unit: int) -> int:
        """Return the index of the unit's first token in its sample."""
        microbatch, n = divmod(unit, self.slices)
        return sum(kept.keys.leaf.shape[2] for own in self._kept[microbatch][:1] for kept in own[:n])

    def _positions(self, start: int, T: int, device: torch.device) -> Tensor:
        positions = torch.arange(start, start + T, device=device)
        if self._transformer.config.num_experts:
            check_whole_groups(positions, self._transformer.config.group_tokens)
        return positions


class _Kept(NamedTuple):
    """A slice's keys or values: the edge in its own graph, and a leaf that later slices use and add gradients to."""

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
    """The `cache` of one attention layer while it computes slice n. `kept` holds the layer's keys and values by slice."""

    def __init__(self, kept: list[_KeysAndValues], n: int):
        self._kept, self._n = kept, n

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the slice's keys and values [b, H/g, t, head_dim]; return those of slices 0 ... n [b, H/g, S, head_dim]."""
        if len(self._kept) == self._n:  # otherwise the backward is recomputing this forward
            self._kept.append(_KeysAndValues(_kept(k), _kept(v)))
        earlier = self._kept[: self._n]
        if not earlier:
            return k, v
        keys, values = (x.keys.leaf for x in earlier), (x.values.leaf for x in earlier)
        return torch.cat((*keys, k), dim=2), torch.cat((*values, v), dim=2)
