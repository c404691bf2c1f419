"""The optimizer of one chunk: a torch optimizer over this rank's part of each parameter in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.arguments import ParamGroup
from minipar.data_parallel.memory import Memory
from minipar.data_parallel.optimizer_interface import State
from minipar.mesh import placement_of, set_placement

MASTER = "master"  # the key of the master copy of a parameter, if there is one
SCALAR_STATES = ("step", "eta", "mu", "mu_product")  # states that torch's optimizers keep as 0-dim tensors


class Chunk(Protocol):
    """The interface that `ChunkOptimizer` needs of a chunk's owner: a `ShardedBucket`, or the flat parameters of FSDP.

    own     [n/p] this rank's part
    shards  parameter -> its part of `own`, with a Placement and, after a backward, a `.grad`
    slice_of_chunk(param, x)   the parameter's part of a tensor x that is laid out like `own`
    """

    own: Tensor
    params: list[nn.Parameter]

    @property
    def shards(self) -> Mapping[nn.Parameter, Tensor]: ...

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor: ...


C = TypeVar("C", bound=Chunk)


class ChunkOptimizer(Generic[C]):
    """Master copy and optimizer state of a bucket's own chunk.

    chunk      [n/p] this rank's chunk of the bucket or, where `has_master`, a copy in another dtype or memory
    masters    parameter -> its part of `chunk`
    optimizer  `optimizer_cls` over `masters`, with the caller's `arguments` and the options of the parameters' groups
    offloaded  all that `memory` holds between two steps: "master" -> `chunk`, and key -> state `key` of the whole chunk

    step       master = optimizer(master, gradient / scale);   shard = master

    Where a parameter was changed since the last step, its new value also replaces its master weight.
    """

    def __init__(
        self,
        bucket: C,
        comm: Comm,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: list[ParamGroup],
        dtype: torch.dtype,
        memory: Memory,
    ):
        self.bucket, self.comm, self.memory = bucket, comm, memory
        self.has_master = dtype != bucket.own.dtype or memory.device not in (None, bucket.own.device)
        self.chunk = memory.copy_of(bucket.own, dtype) if self.has_master else bucket.own
        self.offloaded: dict[str, Tensor] = {MASTER: self.chunk.detach()}
        self.masters = {
            p: bucket.slice_of_chunk(p, self.chunk.detach()).requires_grad_() for p in bucket.params
        }
        for param, master in self.masters.items():
            set_placement(master, placement_of(bucket.shards[param]))
        self._groups: list[int] = []  # for each of the optimizer's groups, the index of the caller's group
        inner: list[ParamGroup] = []
        for i, group in enumerate(groups):
            masters = [self.masters[p] for p in group["params"] if p in self.masters]
            if masters:
                self._groups.append(i)
                inner.append({**options_of(group), "params": masters})
        if getattr(optimizer_cls, "sums_over_shards", False):
            arguments = {**arguments, "comm": comm}
        self.optimizer = optimizer_cls(inner, **arguments)
        self.offload_state()  # Adagrad has states before its first step

    def refresh_masters(self) -> None:
        """Copy values written to the parameters since the last step, such as loaded weights, to the master weights."""
        self._refresh(self.chunk)

    @torch.no_grad()
    def _refresh(self, chunk: Tensor) -> None:
        if not self.has_master:
            return
        own = self.bucket.own.to(chunk.device)
        changed = own != chunk.to(own.dtype)
        if changed.is_cuda or changed.any():  # on a GPU, any() would make the host wait
            chunk.copy_(torch.where(changed, own.to(chunk.dtype), chunk))

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> None:
        """Update the chunk. First read states that are on disk, unless prefetched; at the end, start to write them back."""
        if not self.memory.moves_optimizer_state:
            self._update(self.chunk, grad_scale)
            return
        loaded = self.memory.load(self.offloaded, self.comm.trace)
        self._use(loaded)
        try:
            self._update(loaded[MASTER], grad_scale)
            self._collect_states(loaded)
        finally:
            self._use(self.offloaded)
        self.memory.store(self.offloaded, self.comm.trace)

    def _update(self, chunk: Tensor, grad_scale: float) -> None:
        self._refresh(chunk)
        self._set_gradients(chunk, grad_scale)
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        if self.has_master:
            self.bucket.own.copy_(chunk)

    def _set_gradients(self, chunk: Tensor, grad_scale: float) -> None:
        """Set the masters' `.grad`, divided by `grad_scale` and cast, with two operations on all parameters together."""
        shards = {p: self.bucket.shards[p].grad for p in self.masters}
        found = {p: grad.as_subclass(Tensor) for p, grad in shards.items() if grad is not None}
        if not found:
            return
        if grad_scale != 1 or any((x.dtype, x.device) != (chunk.dtype, chunk.device) for x in found.values()):
            whole = torch.empty_like(chunk)
            parts = {p: self.bucket.slice_of_chunk(p, whole) for p in found}
            flat_parts = [part.view(-1) for part in parts.values()]
            torch._foreach_copy_(flat_parts, [x.reshape(-1) for x in found.values()])
            if grad_scale != 1:
                whole.div_(grad_scale)
            found = parts
        for param, gradient in found.items():
            self.masters[param].grad = gradient.view(self.masters[param].shape)

    def groups(self, of_caller: list[ParamGroup]) -> Iterator[tuple[ParamGroup, ParamGroup]]:
        """Yield the optimizer's groups, each with the caller's group."""
        return zip(self.optimizer.param_groups, (of_caller[i] for i in self._groups))

    def prefetch(self) -> None:
        """If the states that `step` needs are on disk, begin to read them."""
        self.memory.prefetch(self.offloaded, self.comm.trace)

    def tensors_and_states(self) -> Iterator[tuple[Tensor, State]]:
        """Yield each master weight and its state. The caller may replace the state's tensors by others of their shape."""
        self.refresh_masters()
        for master in self.masters.values():
            yield master, self.optimizer.state[master]
        self.offload_state()

    def offload_state(self) -> None:
        """Move states that are not in `memory`, such as loaded states, to it."""
        if self.memory.moves_optimizer_state:
            self._collect_states(self.offloaded)
            self._use(self.offloaded)

    def _use(self, tensors: dict[str, Tensor]) -> None:
        """Replace the masters and the existing states by views of these chunks."""
        for key, whole in tensors.items():
            for param, master in self.masters.items():
                part = self.bucket.slice_of_chunk(param, whole)
                if key == MASTER:
                    master.data = part
                elif key in self.optimizer.state[master]:
                    self.optimizer.state[master][key] = part

    @torch.no_grad()
    def _collect_states(self, chunks: dict[str, Tensor]) -> None:
        """Copy states that are not yet views of `chunks` into them, or into new chunks in `memory`."""
        new: dict[str, Tensor] = {}
        for param, master in self.masters.items():
            for key, value in self.optimizer.state[master].items():
                if is_per_element(key, value, master):
                    if key not in self.offloaded and key not in new:
                        new[key] = torch.zeros_like(self.chunk, dtype=value.dtype)
                    place = self.bucket.slice_of_chunk(param, new[key] if key in new else chunks[key])
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
        for key, whole in new.items():
            self.offloaded[key] = self.memory.copy_of(whole, whole.dtype)


def step_chunks(
    chunks: list[ChunkOptimizer[C]], groups: list[ParamGroup], grad_scale: float
) -> Iterator[ChunkOptimizer[C]]:
    """Update and yield chunk after chunk, while the next chunk's states are read and the previous chunk's are written.

    The options of `groups` are those of the update. What a chunk's optimizer changes in them, a count of steps say, is in
    `groups` afterwards.
    """
    memories = dict.fromkeys(chunk.memory for chunk in chunks)
    of_chunks = [pair for chunk in chunks for pair in chunk.groups(groups)]
    for inner, outer in of_chunks:
        inner.update(options_of(outer))
    try:
        for chunk, following in zip(chunks, [*chunks[1:], None]):
            chunk.prefetch()
            if following is not None:
                following.prefetch()
            chunk.step(grad_scale)
            yield chunk
        for inner, outer in of_chunks:
            outer.update(options_of(inner))
        for memory in memories:
            memory.finish()
    except BaseException:
        for memory in memories:
            memory.forget()
        raise


def options_of(group: ParamGroup) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def is_per_element(key: str, value: object, param: Tensor) -> bool:
    """Return whether a state has one entry per element, unlike the step count, which is one number for the tensor."""
    return isinstance(value, Tensor) and value.shape == param.shape and key not in SCALAR_STATES
