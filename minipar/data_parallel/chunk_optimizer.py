"""The optimizer of one chunk: torch's own, over this rank's part of each parameter of a bucket."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.data_parallel.offload import Memory
from minipar.data_parallel.sharded_bucket import ShardedBucket

SCALAR_STATES = ("step", "eta", "mu", "mu_product")  # states that torch's optimizers keep as 0-dim tensors


class ChunkOptimizer:
    """Master copy and optimizer state of a bucket's own chunk.

    chunk      [n/p] the bucket's own chunk or, where `has_master`, a copy of it in another dtype or memory
    masters    parameter -> its part of `chunk`
    optimizer  `optimizer_cls` over `masters`, with the options of the parameters' groups

    step       master = optimizer(master, gradient / scale);   shard = master

    Where a parameter was changed since the last step, its master weight is too: the parameter decides.
    """

    def __init__(self, bucket: ShardedBucket, optimizer_cls, groups: list[dict], dtype, memory: Memory):
        self.bucket, self.memory = bucket, memory
        self.has_master = dtype != bucket.own.dtype or memory.device not in (None, bucket.own.device)
        self.chunk = memory.copy_of(bucket.own, dtype, "master") if self.has_master else bucket.own
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
        # key -> the state `key` of the whole chunk, in `memory`
        self._offloaded_states: dict[str, Tensor] = {}

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copy to the master weights what was written to the parameters since the last step: loaded weights, say."""
        if not self.has_master:
            return
        own = self.bucket.own.to(self.chunk.device)
        changed = own != self.chunk.to(own.dtype)
        if changed.any():
            self.chunk.copy_(torch.where(changed, own.to(self.chunk.dtype), self.chunk))

    @torch.no_grad()
    def step(self, groups: list[dict], grad_scale: float = 1.0) -> None:
        for i, inner in zip(self._groups, self.optimizer.param_groups):
            inner.update(_options(groups[i]))
        self.refresh_masters()
        for param, master in self.masters.items():
            gradient = self.bucket.shards[param].grad
            if gradient is not None:
                gradient = gradient.as_subclass(Tensor).to(master)
                master.grad = gradient / grad_scale if grad_scale != 1 else gradient
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        if self.has_master:
            self.bucket.own.copy_(self.chunk)
        self.offload_state()

    def prefetch(self) -> None:
        self.memory.fetch([self.chunk, *self._offloaded_states.values()])

    def offload_state(self) -> None:
        """Release the chunk and its states; a state that the optimizer has just made is moved to `memory` first."""
        if not self.memory.moves_optimizer_state:
            return
        for param, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if is_per_element(key, value, master):
                    self.optimizer.state[master][key] = self._move_state(key, param, value)
        self.memory.release([self.chunk, *self._offloaded_states.values()])

    def _move_state(self, key: str, param: nn.Parameter, value: Tensor) -> Tensor:
        if key not in self._offloaded_states:
            self._offloaded_states[key] = self.memory.copy_of(torch.zeros_like(self.chunk), value.dtype, key)
        place = self.bucket.slice_of_chunk(param, self._offloaded_states[key])
        if place.data_ptr() != value.data_ptr():
            place.copy_(value)
        return place


def _options(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_per_element(key: str, value, param: Tensor) -> bool:
    """Return whether a state has an entry per element, unlike one number for all elements, such as the step count."""
    return isinstance(value, Tensor) and value.shape == param.shape and key not in SCALAR_STATES
