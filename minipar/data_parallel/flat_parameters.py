"""A flat buffer of parameters, sharded at rest and all-gathered for use. It has three states and four transitions:

    SHARDED      param.data is this rank's part of the flattened parameter, perhaps empty; `full` has no memory
    UNSHARDING   the same, but `full` has memory, which an all-gather is filling or has filled
    UNSHARDED    param.data is the full parameter, as a view of `full`: no copy is made

    SHARDED --unshard--> UNSHARDING --use_unsharded--> UNSHARDED --use_sharded--> UNSHARDING --reshard--> SHARDED

Autograd may have saved a view of `full` (a transpose, say) for the backward. So `full` is never replaced: resharding frees
its memory with `storage.resize_(0)`, and unsharding allocates it again. The all-gather writes through `full`, not through
the parameters, so their version counters do not change and autograd accepts the refilled memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.transport.stream import Pending
from minipar.data_parallel.flat_layout import FlatLayout
from minipar.data_parallel.fsdp_guards import allow_use, forbid_use
from minipar.data_parallel.memory import Memory
from minipar.mesh import placement_of, set_placement
from minipar.model.init import materialise

# Every parameter and every chunk starts at a multiple of this many elements, which are at least 64 bytes in any dtype.
ALIGNMENT_ELEMS = 64


class State(Enum):
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class FlatParameters(FlatLayout):
    """Parameters of one dtype and one Comm, all trained or all frozen.

    state     see the head of this file
    own       [n/p] in the parameters' dtype: this rank's chunk, the master copy
    full      [n] in the compute dtype; its memory is freed while SHARDED
    comm      the ranks that hold the chunks. None: the parameters are not sharded, `whole` is True, and `full` [n] is
              `own`, unless the compute dtype is another
    replicas  Comms of ranks that hold the same chunk: its gradient is all-reduced over one Comm after the other
    comms     `comm`, if there is one, and `replicas`
    shards    parameter -> itself, which is its shard between two steps: see `Chunk`
    label     names the unit in every collective, so that ranks that run different units are told so
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        unit: str,
        comm: Comm | None,
        replicas: tuple[Comm, ...],
        compute_dtype: torch.dtype | None,
        memory: Memory,
        algorithm: str,
    ):
        super().__init__(params, comm, ALIGNMENT_ELEMS)
        self.unit, self.comm, self.replicas = unit, comm, replicas
        self.comms = replicas if comm is None else (comm, *replicas)
        self.label = f"unit {unit!r}"
        self.whole, self.memory, self.trained = comm is None, memory, params[0].requires_grad
        self.algorithm, self.dtype = algorithm, params[0].dtype
        self.device = self.comms[0].device
        self.names = {p: placement_of(p).name for p in params}
        self.shards = {p: p for p in params}
        self.state = State.SHARDED
        self._compute_dtype = compute_dtype or self.dtype
        self._shard_is_full = self.whole and self._compute_dtype == self.dtype
        self._gathered_versions: dict[nn.Parameter, int] = {}  # the shards' versions at the last gather
        self._pending_gather: Pending | None = None  # the all-gather under way
        self._shard_grads: dict[nn.Parameter, Tensor] = {}  # set aside while their parameters are unsharded

    def slice_of_chunk(self, param: nn.Parameter, chunk: Tensor) -> Tensor:
        """Return the parameter's elements in a tensor laid out like `own`: flat unless the parameter is whole."""
        return self.slice_of_full(param, chunk) if self.whole else super().slice_of_chunk(param, chunk)

    # Sharding full parameters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut(self, axis: str, part_of: Callable[[nn.Parameter], Tensor] | None = None) -> None:
        """Fill `own` from rank 0's parameters or, if given, `part_of(param)`: the flat values of this rank's part."""
        if part_of is None:
            shard = self._chunk_of_rank0()
        else:
            shard = torch.zeros(self.range[1] - self.range[0], dtype=self.dtype, device=self.device)
            for param in self.params:
                place = self.slice_of_chunk(param, shard).view(-1)
                if place.numel():
                    place.copy_(part_of(param))
        away = self.memory.device is not None and not self.whole
        self.own = self.memory.copy_of(shard, self.dtype) if away else shard
        if self._shard_is_full:
            self.full = self.own
        else:
            self.full = torch.empty(self.size, dtype=self._compute_dtype, device=self.device)
        self._make_views(axis)
        if not self._shard_is_full:
            self.full.untyped_storage().resize_(0)

    def _chunk_of_rank0(self) -> Tensor:
        chunk = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for param in self.params:
            self.slice_of_full(param, chunk).copy_(param)
        if self.comm is not None:
            chunk = self.comm.broadcast(chunk)[slice(*self.range)].clone()
        for replicas in self.replicas:
            chunk = replicas.broadcast(chunk)
        return chunk

    def _make_views(self, axis: str) -> None:
        self.full_views = {p: self.slice_of_full(p, self.full) for p in self.params}
        self.shard_views = {p: self.slice_of_chunk(p, self.own) for p in self.params}
        for param in self.params:
            placement = placement_of(param)
            placement = placement if self.whole else placement.flatten_range(*self.part(param))
            if param.is_meta:
                materialise(param, self.shard_views[param])
            else:
                param.data = self.shard_views[param]
            set_placement(param, placement.replicate(axis) if self.replicas else placement)

    # The four transitions -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def unshard(self) -> None:
        """SHARDED -> UNSHARDING: allocate `full` and start its all-gather. Sends (p-1)/p n elements."""
        if self.state is not State.SHARDED or self._shard_is_full:
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = self.full[slice(*self.range)]
        self.memory.copy_to(own, self.own)
        self._gathered_versions = {p: p._version for p in self.params}
        if self.comm is not None:
            with self.comm.saying(self.label):
                self._pending_gather = self.comm.all_gather(
                    own, out=self.full, algorithm=self.algorithm, async_op=True
                )
        self.state = State.UNSHARDING

    def use_unsharded(self) -> None:
        """UNSHARDING -> UNSHARDED: wait for the all-gather, and make the parameters views of `full`."""
        self._wait()
        if self.state is State.UNSHARDED:
            return
        self.state = State.UNSHARDED
        for param, view in self.full_views.items():
            if param.grad is not None:
                self._shard_grads[param] = param.grad
                param.grad = None
            allow_use(param)
            param.data = view

    def use_sharded(self, forbid: bool = False) -> None:
        """UNSHARDED -> UNSHARDING: make the parameters shards again. With `forbid`, computing with them raises."""
        if self.state is State.UNSHARDED:
            self.state = State.SHARDED if self._shard_is_full else State.UNSHARDING
            for param, view in self.shard_views.items():
                param.data = view
                param.grad = self._shard_grads.pop(param, None)
        for param in self.params:
            if forbid and not self.whole:
                forbid_use(param, self.names[param], self.unit)
            else:
                allow_use(param)

    def reshard(self, forbid: bool = False) -> None:
        """Any state -> SHARDED: free the memory of `full`."""
        self._wait()  # the all-gather may still be writing to `full`
        self.use_sharded(forbid)
        if self.state is State.UNSHARDING:
            self.full.untyped_storage().resize_(0)
            self.state = State.SHARDED

    def _wait(self) -> None:
        if self._pending_gather is not None:
            self._pending_gather.wait()
            self._pending_gather = None

    def stale(self) -> bool:
        """Return whether a shard was written to since it was last gathered, for example by an optimizer's step."""
        return any(param._version != version for param, version in self._gathered_versions.items())

    # Invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError if a parameter's storage was replaced, or a frozen parameter is trained now."""
        views = self.full_views if self.state is State.UNSHARDED else self.shard_views
        for param, view in views.items():
            if _memory_of(param) != _memory_of(view):
                raise RuntimeError(
                    f"the storage of {self.names[param]}, in unit {self.unit!r}, was replaced behind FSDP's back "
                    "(module.to(...), param.data = ...); move or cast the model before it is wrapped"
                )
            if param.requires_grad and not self.trained:
                raise RuntimeError(
                    f"{self.names[param]}, in unit {self.unit!r}, was frozen when it was wrapped and no longer is"
                )


def _memory_of(x: Tensor) -> tuple[object, ...]:
    """Return a value that identifies a tensor's memory, even for an empty tensor, where `data_ptr()` does not."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype
