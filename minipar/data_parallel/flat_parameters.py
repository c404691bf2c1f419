"""A flat buffer of parameters, sharded at rest and all-gathered in use. Three states, and the four ways between them:

    SHARDED      param.data is this rank's part of the parameter: a range of it, flat, perhaps empty; `full` has no memory
    UNSHARDING   the same, but `full` has memory, which an all-gather is filling or has filled
    UNSHARDED    param.data is the whole parameter, a view of `full`: nothing is copied out

    SHARDED --unshard--> UNSHARDING --use_unsharded--> UNSHARDED --use_sharded--> UNSHARDING --reshard--> SHARDED

Autograd may have saved a view of `full` (a transpose, say) in place of the parameter. So the buffer stays the same object
for good, and only its memory comes and goes: `storage.resize_(0)` and back. Refilled through `full` itself, it looks to
autograd's version counters like the parameter it saved.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from minipar.data_parallel.buckets import part_in_chunk, slice_of_chunk
from minipar.data_parallel.freed_parameter import guard, unguard
from minipar.data_parallel.offload import Memory
from minipar.mesh import placement_of, set_placement

STEP = 64  # every parameter and every chunk starts at a multiple of 64 elements, so of 64 bytes in any dtype


class State(Enum):
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class FlatParameters:
    """Parameters of one dtype and one Comm, all trained or all frozen.

    state     see above
    shard     [n/p] in the parameters' dtype: this rank's chunk, the master copy
    full      [n] in the compute dtype; without memory while SHARDED
    comm      the ranks that have the other chunks; None: nothing is cut, `whole` is True and shard is [n]
    replicas  Comms over which the same chunk is held: its gradient is summed over one after the other
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        unit: str,
        comm,
        replicas: tuple,
        compute_dtype: torch.dtype | None,
        memory: Memory,
        algorithm: str,
    ):
        self.params, self.unit, self.comm, self.replicas = params, unit, comm, replicas
        self.whole, self.memory, self.trained = comm is None, memory, params[0].requires_grad
        self.algorithm, self.dtype = algorithm, params[0].dtype
        self.device = (comm or replicas[0]).device
        self.names = {p: placement_of(p).name for p in params}
        self.shapes = {p: tuple(p.shape) for p in params}
        self.num_elems = {p: p.numel() for p in params}
        num_ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        starts, self.size = flat_layout([p.numel() for p in params], num_ranks)
        self.starts = dict(zip(params, starts))
        chunk = self.size // num_ranks
        self.range = (rank * chunk, (rank + 1) * chunk)
        self.state = State.SHARDED
        self._compute_dtype = compute_dtype if compute_dtype and not self.whole else self.dtype
        self._gathering = None  # the handle of an all-gather
        self._shard_grads: dict[nn.Parameter, Tensor] = {}  # while their parameters are unsharded

    # Layout -----------------------------------------------------------------------------------------------------

    def part(self, param: nn.Parameter) -> tuple[int, int]:
        """Start and end of this rank's part in the flattened parameter."""
        return part_in_chunk(self.starts[param], self.num_elems[param], self.range)

    def of_full(self, param: nn.Parameter, flat: Tensor) -> Tensor:
        """The parameter's elements in a buffer [n]."""
        return flat[self.starts[param] : self.starts[param] + self.num_elems[param]]

    def of_shard(self, param: nn.Parameter, shard: Tensor) -> Tensor:
        """This rank's part of the parameter in a chunk [n/p]."""
        return shard[slice_of_chunk(self.starts[param], self.num_elems[param], self.range)]

    # Made of full parameters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut(self, value_of: Callable[[nn.Parameter], Tensor], axis: str, broadcast: bool) -> None:
        """Take this rank's chunk of the parameters' values, or with `broadcast` of rank 0's values."""
        if broadcast:
            shard = self._chunk_of_rank0(value_of)
        else:
            shard = torch.zeros(self.range[1] - self.range[0], dtype=self.dtype, device=self.device)
            for param in self.params:
                low, high = self.part(param)
                self.of_shard(param, shard).copy_(value_of(param).reshape(-1)[low:high])
        away = self.memory.device is not None and not self.whole
        self.shard = self.memory.copy_of(shard, self.dtype, "shard") if away else shard
        if self.whole:
            self.full = self.shard
        else:
            self.full = torch.empty(self.size, dtype=self._compute_dtype, device=self.device)
        self._make_views(axis)
        if not self.whole:
            self.full.untyped_storage().resize_(0)

    def _chunk_of_rank0(self, value_of) -> Tensor:
        chunk = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for param in self.params:
            self.of_full(param, chunk).copy_(value_of(param).reshape(-1))
        if self.comm is not None:
            chunk = self.comm.broadcast(chunk)[slice(*self.range)].clone()
        for replicas in self.replicas:
            chunk = replicas.broadcast(chunk)
        return chunk

    def _make_views(self, axis: str) -> None:
        self.full_views = {p: self.of_full(p, self.full).view(self.shapes[p]) for p in self.params}
        shards = {p: self.of_shard(p, self.shard) for p in self.params}
        self.shard_views = self.full_views if self.whole else shards
        for param in self.params:
            placement = placement_of(param)
            placement = placement if self.whole else placement.flatten_range(*self.part(param))
            if param.is_meta:
                _materialise(param, self.shard_views[param])
            else:
                param.data = self.shard_views[param]
            set_placement(param, placement.replicate(axis) if self.replicas else placement)

    # The four transitions -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def unshard(self) -> None:
        """SHARDED -> UNSHARDING: allocate `full` and start its all-gather. Sends (p-1)/p n elements."""
        if self.state is not State.SHARDED or self.whole:
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = self.full[slice(*self.range)]
        own.copy_(self.shard)
        self.memory.release([self.shard])
        self._gathering = self.comm.all_gather(own, out=self.full, algorithm=self.algorithm, async_op=True)
        self.state = State.UNSHARDING

    def use_unsharded(self) -> None:
        """UNSHARDING -> UNSHARDED: wait for the all-gather; the parameters are views of `full`."""
        self._wait()
        if self.state is State.UNSHARDED:
            return
        self.state = State.UNSHARDED
        for param, view in self.full_views.items():
            if param.grad is not None:
                self._shard_grads[param] = param.grad
                param.grad = None
            unguard(param)
            param.data = view

    def use_sharded(self, guarded: bool = False) -> None:
        """UNSHARDED -> UNSHARDING: the parameters are shards again. `guarded`: computing with one is an error."""
        if self.state is State.UNSHARDED:
            self.state = State.SHARDED if self.whole else State.UNSHARDING
            for param, view in self.shard_views.items():
                param.data = view
                param.grad = self._shard_grads.pop(param, None)
        for param in self.params:
            if guarded and not self.whole:
                guard(param, self.names[param], self.unit)
            else:
                unguard(param)

    def reshard(self, guarded: bool = False) -> None:
        """Any state -> SHARDED: free the memory of `full`."""
        self._wait()  # the stream may still be writing there
        self.use_sharded(guarded)
        if self.state is State.UNSHARDING:
            self.full.untyped_storage().resize_(0)
            self.state = State.SHARDED

    def _wait(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    # What must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError where a parameter's storage has been replaced, or a frozen one is trained now."""
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

    def forget_shard_grads(self) -> None:
        """Drop gradients that were set aside while parameters were unsharded: the caller could not zero them."""
        self._shard_grads.clear()


def _memory_of(x: Tensor) -> tuple:
    """Where a tensor's memory is, also an empty tensor's."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype


def _materialise(param: nn.Parameter, value: Tensor) -> None:
    """Give a meta parameter a value; `.data` refuses another kind of tensor."""
    real = nn.Parameter(value, requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, real)


def flat_layout(sizes: list[int], num_ranks: int) -> tuple[list[int], int]:
    """Starts of parameters of these sizes in a flat buffer for so many ranks, and its length."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = -(-(end + size) // STEP) * STEP
    return starts, -(-end // (STEP * num_ranks)) * STEP * num_ranks
