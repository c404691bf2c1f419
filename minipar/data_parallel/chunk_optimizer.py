"""The optimizer of one chunk: torch's own, over this rank's part of each parameter of a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.offload import Memory
from minipar.mesh import placement_of, set_placement

MASTER = "master"  # the key of the optimizer's own copy of a parameter, where it keeps one
SCALAR_STATES = ("step", "eta", "mu", "mu_product")  # states that torch's optimizers keep as 0-dim tensors


class Chunk(Protocol):
    """The owner of a chunk: a `ShardedBucket`, or the flat parameters of FSDP.

    own     [n/p] this rank's part
    shards  parameter -> its part of `own`, with a Placement and, after a backward, a `.grad`
    slice_of_chunk(param, x)   the parameter's part of a tensor laid out as `own` is
    """

    own: Tensor
    comm: Comm
    params: list[nn.Parameter]
    shards: dict[nn.Parameter, Tensor]

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor: ...


class ChunkOptimizer:
    """Master copy and optimizer state of a bucket's own chunk.

    chunk      [n/p] the bucket's own chunk or, where `has_master`, a copy of it in another dtype or memory
    masters    parameter -> its part of `chunk`
    optimizer  `optimizer_cls` over `masters`, with the options of the parameters' groups
    resting    "master" -> `chunk`, and key -> state `key` of the whole chunk: what is in `memory` between two steps

    step       master = optimizer(master, gradient / scale);   shard = master

    Where a parameter was changed since the last step, its master weight is too: the parameter decides.
    """

    def __init__(self, bucket: Chunk, optimizer_cls, groups: list[dict], dtype, memory: Memory):
        self.bucket, self.memory = bucket, memory
        self.has_master = dtype != bucket.own.dtype or memory.device not in (None, bucket.own.device)
        self.chunk = memory.copy_of(bucket.own, dtype) if self.has_master else bucket.own
        self.resting: dict[str, Tensor] = {MASTER: self.chunk.detach()}
        self.masters = {
            p: bucket.slice_of_chunk(p, self.chunk.detach()).requires_grad_() for p in bucket.params
        }
        self._groups, inner = [], []  # _groups: for each of the optimizer's groups, the index of the caller's
        for i, group in enumerate(groups):
            masters = [self.masters[p] for p in group["params"] if p in self.masters]
            if masters:
                self._groups.append(i)
                inner.append({**_options(group), "params": masters})
        comm = {"comm": bucket.comm} if getattr(optimizer_cls, "sums_over_shards", False) else {}
        self.optimizer = optimizer_cls(inner, **comm)

    def refresh_masters(self) -> None:
        """Copy to the master weights what was written to the parameters since the last step: loaded weights, say."""
        self._refresh(self.chunk)

    @torch.no_grad()
    def _refresh(self, chunk: Tensor) -> None:
        if not self.has_master:
            return
        own = self.bucket.own.to(chunk.device)
        changed = own != chunk.to(own.dtype)
        if changed.is_cuda or changed.any():  # to ask would be to wait for the GPU
            chunk.copy_(torch.where(changed, own.to(chunk.dtype), chunk))

    @torch.no_grad()
    def step(self, groups: list[dict], grad_scale: float = 1.0) -> None:
        """Update. Where the states are on disk, they are read, unless they were prefetched, and begin to be written."""
        for i, inner in zip(self._groups, self.optimizer.param_groups):
            inner.update(_options(groups[i]))
        if not self.memory.moves_optimizer_state:
            self._update(self.chunk, grad_scale)
            return
        loaded = self.memory.load(self.resting, self.bucket.comm.trace)
        self._use(loaded)
        try:
            self._update(loaded[MASTER], grad_scale)
            self._collect_states(loaded)
        finally:
            self._use(self.resting)
        self.memory.store(self.resting, self.bucket.comm.trace)

    def _update(self, chunk: Tensor, grad_scale: float) -> None:
        self._refresh(chunk)
        self._set_gradients(chunk, grad_scale)
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        if self.has_master:
            self.bucket.own.copy_(chunk)

    def _set_gradients(self, chunk: Tensor, grad_scale: float) -> None:
        """Give the masters their gradients, divided and in their dtype: two operations, however many parameters."""
        shards = {p: self.bucket.shards[p].grad for p in self.masters}
        found = {p: grad.as_subclass(Tensor) for p, grad in shards.items() if grad is not None}
        if not found:
            return
        if grad_scale != 1 or any((x.dtype, x.device) != (chunk.dtype, chunk.device) for x in found.values()):
            whole = torch.empty_like(chunk)
            parts = {p: self.bucket.slice_of_chunk(p, whole) for p in found}
            torch._foreach_copy_(*([x.reshape(-1) for x in own.values()] for own in (parts, found)))
            found, _ = parts, whole.div_(grad_scale) if grad_scale != 1 else None
        for param, gradient in found.items():
            self.masters[param].grad = gradient.view(self.masters[param].shape)

    def prefetch(self) -> None:
        """Begin to read the states that `step` needs, where they are on disk."""
        self.memory.prefetch(self.resting, self.bucket.comm.trace)

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        """Yield each master weight and its state, to be read or replaced by tensors of its shape."""
        self.refresh_masters()
        for param, master in self.masters.items():
            set_placement(master, placement_of(self.bucket.shards[param]))
            yield master, self.optimizer.state[master]
        self.offload_state()

    def offload_state(self) -> None:
        """Move states that are not in `memory`, such as loaded ones, there."""
        if self.memory.moves_optimizer_state:
            self._collect_states(self.resting)
            self._use(self.resting)

    def _use(self, tensors: dict[str, Tensor]) -> None:
        """Make the masters, and those states that there are, parts of these chunks."""
        for key, whole in tensors.items():
            for param, master in self.masters.items():
                part = self.bucket.slice_of_chunk(param, whole)
                if key == MASTER:
                    master.data = part
                elif key in self.optimizer.state[master]:
                    self.optimizer.state[master][key] = part

    @torch.no_grad()
    def _collect_states(self, chunks: dict[str, Tensor]) -> None:
        """Copy the states that are not parts of these chunks to them, or to new ones in `memory`."""
        new: dict[str, Tensor] = {}
        for param, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if is_per_element(key, value, master):
                    if key not in self.resting and key not in new:
                        new[key] = torch.zeros_like(self.chunk, dtype=value.dtype)
                    place = self.bucket.slice_of_chunk(param, new[key] if key in new else chunks[key])
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
        for key, whole in new.items():
            self.resting[key] = self.memory.copy_of(whole, whole.dtype)


def step_chunks(
    chunks: list[ChunkOptimizer], groups: list[dict], grad_scale: float
) -> Iterator[ChunkOptimizer]:
    """Update one chunk after another, and yield each; meanwhile the next one's states are read, the last one's written."""
    memories = dict.fromkeys(chunk.memory for chunk in chunks)
    try:
        for chunk, following in zip(chunks, [*chunks[1:], None]):
            chunk.prefetch()
            if following is not None:
                following.prefetch()
            chunk.step(groups, grad_scale)
            yield chunk
        for memory in memories:
            memory.finish()
    except BaseException:
        for memory in memories:
            memory.forget()
        raise


def _options(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_per_element(key: str, value, param: Tensor) -> bool:
    """Return whether a state has an entry per element, unlike one number for all elements, such as the step count."""
    return isinstance(value, Tensor) and value.shape == param.shape and key not in SCALAR_STATES
