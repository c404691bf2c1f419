"""ZeRO-1 and ZeRO-2: the data-parallel ranks shard the optimizer's state and, in ZeRO-2, the gradients too.

Adds to `simple/zero.py`: buckets, unused parameters, parameter groups, master copies, LAMB, offload, and a state dict that
can be loaded on another number of ranks.

A backward reduces here: GradientReducer, as soon as a bucket has its gradients -> `ShardedBucket.reduce` ->
`reductions.reduce_plainly`. (`minipar train --zero 2` accumulates first; `--reduce-every microbatch` reduces in each.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel import arguments, optimizer_state
from minipar.data_parallel.buckets import make_buckets
from minipar.data_parallel.chunk_optimizer import ChunkOptimizer, options_of, step_chunks
from minipar.data_parallel.gradient_reducer import GradientReducer
from minipar.data_parallel.memory import memory_for
from minipar.data_parallel.optimizer_interface import State
from minipar.data_parallel.optimizer_state import StateDict
from minipar.data_parallel.partial_gradients import ReducedGradient
from minipar.data_parallel.reductions import ReduceBucket, ReduceOptions
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.unused_parameters import used_on_any_rank
from minipar.mesh import placement_of


class ZeroOptimizer(torch.optim.Optimizer):
    """Shard the state of `optimizer_cls` over p ranks. Replaces DDP, since it reduces the gradients itself.

    params         parameters, (name, parameter) pairs, or parameter groups; every rank gets rank 0's values. Only with
                   names are ranks told that give parameters of equal shapes in another order
    optimizer_cls  any per-element torch optimizer, or `Lamb`; `kwargs` are its arguments
    comm           the ranks that hold a replica, or a function from parameter to Comm
    stage          1: optimizer state is sharded. 2: gradients too; each bucket is freed when it has been reduced
    reduce         "mean", for a loss that is a mean over this rank's samples; "sum", for one divided by the global count
    master_dtype   the dtype of master weights, if it is not the parameters' dtype: float32 for bf16 parameters
    reduce_dtype   the dtype in which gradients are summed, over ranks and over backwards; default: master_dtype
    offload        None, "cpu" or "disk": the memory of master weights and state; `folder` for the file. See memory.py
    per_element    True: accept an optimizer class that is not known to update each element from that element alone
    reduce_bucket  what starts to reduce a bucket, in place of `reduce_plainly`: see reductions.py

    backward       shard.grad = 1/p * sum over ranks of grad       reduce-scatter, bucket by bucket, during the backward
    step           shard = optimizer_cls(shard, shard.grad)        then all-gather, while the next bucket is updated

    `shards` has one leaf tensor with a Placement per parameter. After a backward, the gradient is in `shard.grad` (None
    where no rank used the parameter), and `param.grad` is a ReducedGradient: only later backwards and `zero_grad` (the
    optimizer's or the model's) can use it. Under `no_sync()` gradients accumulate in `param.grad` instead.
    Every rank must use a parameter in each backward outside `no_sync`, or it takes no part in the reduction, and the others
    are told of a deadlock in that bucket; where a rank may use none, run all backwards under `no_sync`.
    Parameters that all ranks add by `add_param_group`, or thaw before `zero_grad` or `step`, get buckets of their own.
    A value written to a parameter, such as a loaded weight, also replaces its master weight. The optimizer does not
    handle buffers: make them equal on all ranks yourself.
    Parameters given in the order of registration fill the same buckets as in DDP, and with algorithm "auto", "ring" or
    "halving_doubling" their sums are bitwise DDP's. If groups put them in another order, buckets and chunks differ, and on
    3 or more ranks rounding differs too.

    Sends at construction a digest of 16 bytes to each other rank, and the parameters. Sends per step (p-1)/p of every
    bucket twice (see buckets.py for its size; the first time in reduce_dtype), and an
    all-reduce of one byte per parameter: 2P elements in all for P parameters, as in DDP. In mixed precision with Adam,
    holds 4 + 12/p bytes per parameter in stage 1, and 2 + 14/p in stage 2. M backwards outside no_sync accumulate in the
    shards, in reduce_dtype: they send (M+1)P elements, and in mixed precision need 4/p bytes more in stage 1, 2/p in
    stage 2. If all but the last are under no_sync, they send 2P elements, but full gradients are held; from the second
    one on in reduce_dtype, 4 bytes more per parameter.
    Raises ValueError for a bad argument, a state that does not fit, or ranks whose parameters or options differ;
    TypeError for a copy, RuntimeError if a parameter's storage was replaced, a later optimizer or DDP was made for it, or
    torch clips or unscales its gradient.
    Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        comm: Comm | arguments.CommOf,
        stage: int = 1,
        *,
        reduce: str = "mean",
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        algorithm: str = "auto",
        master_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: str | None = None,
        folder: str | None = None,
        per_element: bool = False,
        axis: str = "dp",
        reduce_bucket: ReduceBucket | None = None,
        **kwargs: Any,
    ):
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} does not exist here; use 1 or 2, or FSDP for stage 3")
        arguments.require_per_element(optimizer_cls, per_element)
        self.optimizer_cls, self._arguments, self.stage = optimizer_cls, kwargs, stage
        self._options = ReduceOptions.of(reduce, algorithm, reduce_dtype or master_dtype, reduce_bucket)
        self._master_dtype, self._axis = master_dtype, axis
        self._bucket_sizes = arguments.bucket_sizes(bucket_mb, first_bucket_mb)
        self._comm_of = arguments.function_of_parameter(comm)
        self._memory = memory_for(offload, folder)
        self._chunks: list[ChunkOptimizer[ShardedBucket]] = []
        # In stage 2, at most two reduce-scatters at a time, since each holds a bucket of full gradients.
        at_once = 2 if stage == 2 else None
        self.reducer: GradientReducer[ShardedBucket] = GradientReducer(
            "ZeroOptimizer", self._finish, at_once=at_once
        )
        self.buckets = self.reducer.buckets
        # What all ranks must have in common, besides the parameters.
        self._shared: dict[str, object] = dict(
            optimizer_cls=getattr(optimizer_cls, "__qualname__", optimizer_cls), stage=stage, reduce=reduce,
            bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb, algorithm=algorithm, master_dtype=master_dtype,
            reduce_dtype=reduce_dtype, offload=offload, reduce_bucket=reduce_bucket is not None,
        ) | kwargs  # fmt: skip
        self._begun = False
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **kwargs).defaults
        super().__init__(params, defaults)
        self._begun = True
        self._shard(self.param_groups)

    def add_param_group(self, param_group: arguments.ParamGroup) -> None:
        """Add a group, in buckets of its own. Every rank must call it."""
        super().add_param_group(param_group)
        if self._begun:  # torch's constructor also calls this, once for each group
            self._shard(self.param_groups[-1:])

    @torch.no_grad()
    def _shard(self, groups: list[arguments.ParamGroup]) -> None:
        """Broadcast rank 0's values of the groups' parameters, and put trained parameters into sharded buckets."""
        arguments.place_by_number(self.param_groups)
        params = [p for group in groups for p in group["params"]]
        arguments.require_whole(params, "ZeroOptimizer")
        options: dict[str, object] = {
            f"{key} of group {i}": value
            for i, group in enumerate(self.param_groups)
            for key, value in options_of(group).items()
        }
        arguments.require_same_parameters(self._comm_of, self._named(params), self._shared | options)
        for frozen in (p for p in params if not p.requires_grad):
            frozen.copy_(self._comm_of(frozen).broadcast(frozen))
        self._make_chunks()

    def _named(self, params: list[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
        wanted = set(params)
        for i, group in enumerate(self.param_groups):
            yield from ((f"{placement_of(p).name} of group {i}", p) for p in group["params"] if p in wanted)

    def _shard_thawed(self) -> None:
        """Shard the parameters that were thawed. If only some ranks have thawed them, this is the error's place."""
        if thawed := self._trained_without_bucket():
            arguments.require_same_parameters(self._comm_of, self._named(thawed))
        self._make_chunks()

    def _make_chunks(self) -> None:
        """Put the trained parameters that have no bucket yet into new, sharded buckets."""
        self.reducer.check()
        params = self._trained_without_bucket()
        buckets = make_buckets(params, self._comm_of, *self._bucket_sizes, self._make_bucket)
        for bucket in buckets:
            dtype = self._master_dtype or bucket.flat.dtype
            self._chunks.append(
                ChunkOptimizer(
                    bucket,
                    bucket.comm,
                    self.optimizer_cls,
                    self._arguments,
                    self.param_groups,
                    dtype,
                    self._memory,
                )
            )
            self.reducer.unreduced = True
        self.reducer.add(buckets)

    def _make_bucket(
        self, params: list[nn.Parameter], comm: Comm, flagged: Iterable[nn.Parameter]
    ) -> ShardedBucket:
        return ShardedBucket(params, comm, flagged, self._options, self.stage == 1, self._axis)

    def _trained_without_bucket(self) -> list[nn.Parameter]:
        params = [p for group in self.param_groups for p in group["params"]]
        return [p for p in params if p.requires_grad and p not in self.reducer.bucket_of]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the parameters. Gradient norms need these.

        Raises RuntimeError while a gradient is not reduced: a norm would leave it out.
        """
        for param in self.reducer.bucket_of:
            reduced = isinstance(param.grad, ReducedGradient) and param.grad.added is None
            if param.grad is not None and not reduced:
                raise RuntimeError(
                    f"the gradient of {placement_of(param).name} is not reduced, so its shard has none or a part; call "
                    "synchronize() of the ZeroOptimizer before you use its shards (tensors are the same, unchecked)"
                )
        return self.tensors

    @property
    def tensors(self) -> list[Tensor]:
        """Return the shards without asking whether their gradients are reduced."""
        for param in self._trained_without_bucket():
            if param.grad is not None:
                raise RuntimeError(f"{placement_of(param).name} was thawed after zero_grad(); thaw it before")
        for bucket in self.buckets:
            bucket.drop_discarded()
        params = [p for group in self.param_groups for p in group["params"]]
        bucket_of = self.reducer.bucket_of
        return [bucket_of[p].shards[p] for p in params if p in bucket_of]

    @property
    def state(self) -> NoReturn:
        raise RuntimeError(
            "a ZeroOptimizer's state is in shards, so torch's get_optimizer_state_dict would take a part for the "
            "whole; use full_state_dict() and load_full_state_dict(), tensors_and_states(), or the dcp of minipar.extras"
        )

    @state.setter
    def state(self, value: object) -> None:
        """Do nothing: torch's constructor sets it, and nobody reads it."""

    def tensors_and_states(self) -> Iterator[tuple[Tensor, State]]:
        """Yield each shard, or its master copy, and its optimizer state, which the caller may read or replace."""
        for chunk in self._chunks:
            yield from chunk.tensors_and_states()

    # Gradients ------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only accumulate; the next backward outside it, or `step`, reduces the sum."""
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now. Call it if the last backward ran inside `no_sync()`."""
        self._shard_thawed()
        self.reducer.synchronize()

    def reduce_pending(self) -> None:
        """Reduce the accumulated gradients, unless a backward has done so since the last `no_sync` or `zero_grad`.

        Inside `no_sync`, always reduce: whether a backward has added gradients may differ between ranks.
        """
        self._shard_thawed()
        if self.reducer.unreduced or not self.reducer.synchronised:
            self.synchronize()
        for bucket in self.buckets:
            bucket.drop_discarded()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients. After an exception in a backward, all are dropped, for what was reduced is a part."""
        interrupted = self.reducer.reset_after_error()
        self._shard_thawed()
        super().zero_grad(set_to_none)
        self.reducer.unreduced = True
        if set_to_none or interrupted:
            for bucket in self.buckets:
                bucket.discard_grads()

    def _finish(self) -> None:
        """Set the shards' `.grad`."""
        comms = {p: bucket.comm for p, bucket in self.reducer.bucket_of.items()}
        used = used_on_any_rank(comms, self.reducer.used, self._options.algorithm)
        for bucket in self.buckets:
            bucket.write_shards(used)

    # The step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scale: float = 1.0) -> Any:
        """Update this rank's chunk of every bucket, with gradients divided by `grad_scale`, and all-gather the chunks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reducer.check()
        for bucket in self.buckets:
            bucket.check()
        self.reduce_pending()
        chunks = step_chunks(self._chunks, self.param_groups, grad_scale)
        for handle in [chunk.bucket.gather() for chunk in chunks]:
            handle.wait()
        return loss

    # Its state ------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> StateDict:
        """Return, on every rank, the state dict that `optimizer_cls` would have in one process, plus "master" weights."""
        return optimizer_state.full_state_dict(self._chunks, self.param_groups)

    def load_full_state_dict(self, full: StateDict) -> None:
        """Load a full state, made on any number of ranks or by `optimizer_cls` itself. Does not load the parameters."""
        optimizer_state.load_full_state_dict(self._chunks, self.param_groups, full)

    def state_dict(self) -> StateDict:
        """Return this rank's part of the state, including options and master weights. Sends nothing."""
        return optimizer_state.own_state_dict(self._chunks, self.param_groups)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the `state_dict()` of the same rank, of as many ranks with equal buckets. Does not load the parameters."""
        optimizer_state.load_own_state_dict(self._chunks, self.param_groups, state_dict)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        arguments.refuse_copy(
            "a ZeroOptimizer", "keep its state_dict() or full_state_dict(), and make another"
        )
