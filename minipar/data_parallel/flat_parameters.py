"""Parameters that are gathered together: one flat buffer, of which this rank keeps a chunk and borrows the rest.

    between steps      param.data is this rank's part of the parameter: a range of it, flat, maybe empty
    while in use       param.data is the whole parameter: a view of `full`, filled by one all-gather, nothing copied out

What autograd has saved of a parameter may be a view of `full` (a transpose, say). So the buffer stays the same object for
good, and only its memory comes and goes: `storage.resize_(0)` and back. Refilled through `full` itself, it looks to
autograd's version counters like the parameter it saved.
"""

# longer than 250 lines because shard, whole and gradient of a flat buffer are three states of one thing

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minipar.data_parallel.freed_parameter import guard, unguard
from minipar.data_parallel.offload import Memory
from minipar.mesh import placement_of, set_placement

STEP = 64  # every parameter and every chunk starts at a multiple of 64 elements, so of 64 bytes in any dtype


class FlatParameters:
    """Parameters of one dtype and one Comm, all trained or all frozen.

    shard     [n/p] in the parameters' dtype: this rank's chunk, the master copy
    full      [n] in the compute dtype; without memory unless `gather` has filled it
    arrived   parameter -> its full gradient in reduce_dtype, waiting for the others of the unit
    comm      the ranks that have the other chunks; None: nothing is cut, shard is [n] and `whole` is True
    copies    Comms over which the same chunk is held: its gradient is summed over one after the other
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        unit: str,
        comm,
        copies: tuple,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        memory: Memory,
    ):
        self.params, self.unit, self.comm, self.copies = params, unit, comm, copies
        self.whole, self.memory, self.trained = comm is None, memory, params[0].requires_grad
        self.device = (comm or copies[0]).device
        self.dtype = params[0].dtype
        self.reduce_dtype = reduce_dtype or self.dtype
        self.names = {p: placement_of(p).name for p in params}
        self.shapes = {p: tuple(p.shape) for p in params}
        self.num_elems = {p: p.numel() for p in params}
        num_ranks, rank = (1, 0) if comm is None else (comm.size, comm.rank)
        starts, self.size = flat_layout([p.numel() for p in params], num_ranks)
        self.starts = dict(zip(params, starts))
        chunk = self.size // num_ranks
        self.range = (rank * chunk, (rank + 1) * chunk)
        self.filled = self.shows_full = False
        self.arrived: dict[nn.Parameter, Tensor] = {}
        self._gathering = self._reducing = None  # handles
        self._copies_left: list = []  # to sum over after what is being reduced
        self._reduced: Tensor | None = None  # [n/p] what this backward has reduced so far
        self._kept: dict[nn.Parameter, Tensor] = {}  # gradients, while their parameters show something else
        self._compute_dtype = compute_dtype if compute_dtype and not self.whole else self.dtype

    # Made of full parameters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut(self, value_of: Callable[[nn.Parameter], Tensor], axis: str, share: bool) -> None:
        """Take this rank's chunk of the parameters' values, or with `share` of rank 0's."""
        if share:
            shard = self._chunk_of_rank_0(value_of)
        else:
            shard = torch.zeros(self.range[1] - self.range[0], dtype=self.dtype, device=self.device)
            for param in self.params:
                low, high = self.part(param)
                self._part_of_shard(param, shard).copy_(value_of(param).reshape(-1)[low:high])
        away = self.memory.device is not None and not self.whole
        self.shard = self.memory.copy_of(shard, self.dtype, "shard") if away else shard
        if self.whole:
            self.full = self.shard
        else:
            self.full = torch.empty(self.size, dtype=self._compute_dtype, device=self.device)
        self._make_views(axis)
        if not self.whole:
            self.full.untyped_storage().resize_(0)

    def _chunk_of_rank_0(self, value_of) -> Tensor:
        chunk = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for param in self.params:
            self._part_of_full(param, chunk).copy_(value_of(param).reshape(-1))
        if self.comm is not None:
            chunk = self.comm.broadcast(chunk)[slice(*self.range)].clone()
        for copies in self.copies:
            chunk = copies.broadcast(chunk)
        return chunk

    def _make_views(self, axis: str) -> None:
        self.full_views = {p: self._part_of_full(p, self.full).view(self.shapes[p]) for p in self.params}
        shards = {p: self._part_of_shard(p, self.shard) for p in self.params}
        self.shard_views = self.full_views if self.whole else shards
        for param in self.params:
            placement = placement_of(param)
            placement = placement if self.whole else placement.flatten_range(*self.part(param))
            if param.is_meta:
                _materialise(param, self.shard_views[param])
            else:
                param.data = self.shard_views[param]
            set_placement(param, placement.replicate(axis) if self.copies else placement)

    def part(self, param: nn.Parameter) -> tuple[int, int]:
        """Where in the flattened parameter this rank's part of it begins and ends."""
        low, high = (min(max(edge - self.starts[param], 0), self.num_elems[param]) for edge in self.range)
        return low, high

    def _part_of_full(self, param: nn.Parameter, flat: Tensor) -> Tensor:
        return flat[self.starts[param] : self.starts[param] + self.num_elems[param]]

    def _part_of_shard(self, param: nn.Parameter, shard: Tensor) -> Tensor:
        low, high = self.part(param)
        at = self.starts[param] + low - self.range[0] if high > low else 0
        return shard[at : at + high - low]

    # Gathered and freed -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, algorithm: str) -> None:
        """Start to fill `full`, unless that has been done."""
        if self.filled or self.whole:
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        own = self.full[slice(*self.range)]
        own.copy_(self.shard)
        self.memory.release([self.shard])
        self._gathering = self.comm.all_gather(own, out=self.full, algorithm=algorithm, async_op=True)
        self.filled = True

    def show_full(self) -> None:
        """Give the parameters their full values, when they have arrived."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.shows_full:
            return
        self.shows_full = True
        for param, view in self.full_views.items():
            if param.grad is not None:
                self._kept[param] = param.grad
                param.grad = None
            unguard(param)
            param.data = view

    def show_shard(self, guarded: bool = False) -> None:
        """Give the parameters their shards, and the shards' gradients; `guarded`: using one of them is an error."""
        if self.shows_full:
            self.shows_full = False
            for param, view in self.shard_views.items():
                param.data = view
                param.grad = self._kept.pop(param, None)
        for param in self.params:
            if guarded and not self.whole:
                guard(param, self.names[param], self.unit)
            else:
                unguard(param)

    def free(self, guarded: bool = False) -> None:
        """Give up the full parameters."""
        if self._gathering is not None:
            self._gathering.wait()  # the stream may still be writing there
            self._gathering = None
        self.show_shard(guarded)
        if self.filled:
            self.full.untyped_storage().resize_(0)
            self.filled = False

    def check(self) -> None:
        """Raise where a parameter is not what it was made to be."""
        for param, view in (self.full_views if self.shows_full else self.shard_views).items():
            if _where(param) != _where(view):
                raise RuntimeError(
                    f"the storage of {self.names[param]}, in unit {self.unit!r}, was replaced behind FSDP's back "
                    "(module.to(...), param.data = ...); move or cast the model before it is wrapped"
                )
            if param.requires_grad and not self.trained:
                raise RuntimeError(
                    f"{self.names[param]}, in unit {self.unit!r}, was frozen when it was wrapped and no longer is"
                )

    # Gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a full gradient, which nobody else holds, to those waiting to be reduced."""
        gradient = gradient.to(self.reduce_dtype)
        before = self.arrived.get(param)
        self.arrived[param] = gradient if before is None else before.add_(gradient)

    @torch.no_grad()
    def reduce(self, op: str, algorithm: str) -> None:
        """Start the reduce-scatter of the gradients that are waiting; a missing one counts as zero."""
        if not self.trained:
            return
        gradients = torch.empty(self.size, dtype=self.reduce_dtype, device=self.device)
        for param in self.params:
            place, gradient = self._part_of_full(param, gradients), self.arrived.pop(param, None)
            place.zero_() if gradient is None else place.view(self.shapes[param]).copy_(gradient)
        while self.settle(op, algorithm):
            pass
        self._copies_left = list(self.copies)
        if self.whole:
            self._reducing = self._copies_left.pop(0).all_reduce_(gradients, op, algorithm, async_op=True)
        else:
            self._reducing = self.comm.reduce_scatter(gradients, op, algorithm=algorithm, async_op=True)

    def settle(self, op: str, algorithm: str) -> bool:
        """Wait for the step of the reduction that was started, and start the next. Is there one?

        The first step was the reduce-scatter: waiting for it frees the full gradients.
        """
        if self._reducing is None:
            return False
        chunk, self._reducing = self._reducing.wait(), None
        if self._copies_left:
            self._reducing = self._copies_left.pop(0).all_reduce_(chunk, op, algorithm, async_op=True)
        else:
            self._add(chunk)
        return self._reducing is not None

    @torch.no_grad()
    def _add(self, chunk: Tensor) -> None:
        chunk = chunk.to(self.shard.device, self.dtype)
        self._reduced = chunk if self._reduced is None else self._reduced.add_(chunk)

    @torch.no_grad()
    def deliver(self, used: set[nn.Parameter]) -> None:
        """Add what has been reduced to the gradients of the shards; a parameter that no rank used gets none."""
        assert self._reducing is None
        assert not self.shows_full
        chunk, self._reduced = self._reduced, None
        for param in self.params if chunk is not None else ():
            if param in used:
                part = self._part_of_full(param, chunk) if self.whole else self._part_of_shard(param, chunk)
                part = part.view(self.shard_views[param].shape)
                param.grad = part if param.grad is None else param.grad.add_(part)

    def forget(self) -> None:
        """Drop full gradients that were never reduced, after an error, and what has been added up of units it cut short."""
        self._kept.clear()  # the caller could not zero these
        self._reducing = self._reduced = None
        self.arrived.clear()


def _where(x: Tensor) -> tuple:
    """Which memory it is, also where it is an empty part of it."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype


def _materialise(param: nn.Parameter, value: Tensor) -> None:
    """Give a meta parameter a value; `.data` refuses another kind of tensor."""
    real = nn.Parameter(value, requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, real)


def flat_layout(sizes: list[int], num_ranks: int) -> tuple[list[int], int]:
    """Where parameters of these sizes start in a flat buffer for so many ranks, and its length."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end = -(-(end + size) // STEP) * STEP
    return starts, -(-end // (STEP * num_ranks)) * STEP * num_ranks
