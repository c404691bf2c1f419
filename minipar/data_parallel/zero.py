"""ZeRO-1 and ZeRO-2: the optimizer's state, then the gradients too, are sharded over the ranks that are DDP's replicas.

`simple/zero.py`, plus buckets reduced during the backward, unused parameters, parameter groups, master copies, LAMB,
offload, and a state dict that can be loaded on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel import arguments, optimizer_state
from minipar.data_parallel.buckets import Bucket, make_buckets
from minipar.data_parallel.chunk_optimizer import ChunkOptimizer, step_chunks
from minipar.data_parallel.compress.plain_mean import Compressors
from minipar.data_parallel.elementwise_optimizers import require_per_element
from minipar.data_parallel.gradient_reducer import GradientReducer
from minipar.data_parallel.offload import memory_for
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.unused_parameters import used_on_any_rank
from minipar.mesh import placement_of


class ZeroOptimizer(torch.optim.Optimizer):
    """Shard the state of `optimizer_cls` over p ranks. Replaces DDP, since it reduces the gradients itself.

    params         parameters, (name, parameter) pairs, or parameter groups; every rank gets rank 0's values
    optimizer_cls  any per-element torch optimizer, or `Lamb`; `kwargs` are its arguments
    comm           the ranks that hold a replica, or a function from parameter to Comm
    stage          1: optimizer state is sharded. 2: gradients too, each bucket freed when it has been reduced
    reduce         "mean", for a loss that is a mean over this rank's samples; "sum", for one divided by the global count
    master_dtype   of master weights, if not the parameters' own dtype: float32 for bf16 parameters
    reduce_dtype   of the gradient reduction; default: master_dtype
    offload        None, "cpu" or "disk": the memory of master weights and state; `folder` for the file. See offload.py
    per_element    True: accept an optimizer class that is not known to update each element from that element alone
    compress       of stage 1, as DDP's, with its bits and its bytes in place of the reduce-scatter's

    backward       shard.grad = 1/p * sum over ranks of grad       reduce-scatter, bucket by bucket, during the backward
    step           shard = optimizer_cls(shard, shard.grad)        then all-gather, while the next bucket is updated

    After a backward, gradients are in `shards`, a leaf tensor with a Placement per parameter: `shard.grad` (None where no
    rank used the parameter). `param.grad` is then a ReducedGradient, which only `zero_grad`, the optimizer's or the
    model's, and later backwards can use. Under `no_sync()` gradients accumulate in `param.grad` instead.
    Parameters added by `add_param_group`, or thawed before `zero_grad` or `step`, get buckets of their own. A parameter
    written to (weights were loaded) gives its value to its master weight. Buffers are not the optimizer's: make them
    equal on all ranks yourself.
    Parameters in the order of registration fill the same buckets as in DDP, so the sums are bitwise DDP's with algorithm
    "auto", "ring" or "halving_doubling". Parameters that groups put in another order fill other buckets with other chunks:
    on 3 or more ranks, rounding differs.

    Sends per step (p-1)/p of every bucket twice (see buckets.py for its size; the first time in reduce_dtype), and an
    all-reduce of one byte per parameter. In all 2P elements, as DDP. Holds, in mixed precision with Adam, 4 + 12/p bytes
    per parameter in stage 1, and 2 + 14/p in stage 2. Backwards outside no_sync accumulate in the shards: M of them send
    (M+1)P elements, and the memory of stage 2 stays as above. Under no_sync, all but the last send nothing, so that M
    backwards send 2P, but full gradients are held.
    Raises ValueError for a bad argument or a state that does not fit, TypeError for a copy, RuntimeError where a
    parameter's storage was replaced, a later optimizer or DDP was made for it, or torch clips or unscales its gradient.
    Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        comm: Comm | Callable[[Tensor], Comm],
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
        compress: Callable[[Comm], object] | None = None,
        **kwargs,
    ):
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} does not exist here; use 1 or 2, or FSDP for stage 3")
        arguments.require_reduce(reduce)
        require_per_element(optimizer_cls, per_element)
        self.optimizer_cls, self.stage, self.reduce, self.algorithm = optimizer_cls, stage, reduce, algorithm
        self._master_dtype, self._reduce_dtype, self._axis = master_dtype, reduce_dtype, axis
        self._bucket_sizes = arguments.bucket_sizes(bucket_mb, first_bucket_mb)
        self._comm_of = arguments.function_of_parameter(comm)
        self._memory, self.compressors = memory_for(offload, folder), Compressors(compress)
        self._chunks: list[ChunkOptimizer] = []
        self._unreduced = True
        self._pending: list[Callable[[], None]] = []
        self.reducer = GradientReducer([], self._launch, self._finish, "ZeroOptimizer")
        self.buckets: list[ShardedBucket] = self.reducer.buckets
        self._begun = False
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **kwargs).defaults
        super().__init__(params, defaults)
        self._begun = True
        self._shard(self.param_groups)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group, in buckets of its own. Every rank must call it."""
        super().add_param_group(param_group)
        if self._begun:  # torch calls this for the first groups too, one by one
            self._shard(self.param_groups[-1:])

    @torch.no_grad()
    def _shard(self, groups: list[dict]) -> None:
        """Give the groups' parameters rank 0's values and, where they are trained, buckets."""
        arguments.place_by_number(self.param_groups)
        params = [p for group in groups for p in group["params"]]
        arguments.require_whole(params, "ZeroOptimizer")
        for frozen in (p for p in params if not p.requires_grad):
            frozen.copy_(self._comm_of(frozen).broadcast(frozen))
        self._shard_trained()

    def _shard_trained(self) -> None:
        """Shard the trained parameters that are in no bucket: at first all, later those of a new group, or thawed."""
        self.reducer.check()
        for bucket in self._make_buckets(self._trained_without_bucket()):
            wide = self._master_dtype or bucket.flat.dtype
            chunk = ChunkOptimizer(bucket, self.optimizer_cls, self.param_groups, wide, self._memory)
            self._chunks.append(chunk)
            self._unreduced = True
        self.reducer.add([chunk.bucket for chunk in self._chunks[len(self.buckets) :]])

    def _make_buckets(self, params: list[nn.Parameter]) -> list[ShardedBucket]:
        buckets = make_buckets(params, self._comm_of, *self._bucket_sizes)
        keep, wide = self.stage == 1, self._reduce_dtype or self._master_dtype
        return [self._sharded(bucket, keep, wide or bucket.flat.dtype, self._axis) for bucket in buckets]

    def _sharded(self, bucket: Bucket, *options) -> ShardedBucket:
        return ShardedBucket(bucket, *options)

    def _trained_without_bucket(self) -> list[nn.Parameter]:
        params = [p for group in self.param_groups for p in group["params"]]
        return [p for p in params if p.requires_grad and p not in self.reducer.bucket_of]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the parameters: take gradient norms of these."""
        for param in self._trained_without_bucket():
            if param.grad is not None:
                raise RuntimeError(f"{placement_of(param).name} was thawed after zero_grad(); thaw it before")
        for bucket in self.buckets:
            bucket.drop_discarded()
        params = [p for group in self.param_groups for p in group["params"]]
        bucket_of = self.reducer.bucket_of
        return [bucket_of[p].shards[p] for p in params if p in bucket_of]

    tensors = shards  # in `OptimizerInterface`

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        """Yield each shard, or its master copy, and its optimizer state, to be read or replaced by tensors of its shape."""
        for chunk in self._chunks:
            yield from chunk.tensors_and_states()

    # Gradients ------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards only accumulate full gradients; the next one outside, or `step`, reduces the sum."""
        self.reducer.check()
        self._unreduced = True
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self._shard_trained()
        self.reducer.synchronize()

    def reduce_pending(self) -> None:
        """Reduce the accumulated gradients, unless a backward has done so since the last `no_sync` or `zero_grad`."""
        self._shard_trained()
        if self._unreduced:
            self.synchronize()
        for bucket in self.buckets:
            bucket.drop_discarded()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._shard_trained()
        super().zero_grad(set_to_none)
        self._unreduced = True
        if set_to_none:
            for bucket in self.buckets:
                bucket.discard_grads()

    def _launch(self, bucket: ShardedBucket) -> None:
        # At most two reduce-scatters at a time, since each holds a bucket of full gradients.
        if self.stage == 2 and len(self._pending) > 1:
            self._pending.pop(0)()
        compressor = self.compressors.of(bucket.comm)
        self._pending.append(bucket.reduce(self.reduce, self.algorithm, compressor))

    def _finish(self) -> None:
        """Wait for the reduce-scatters, and set the shards' `.grad`."""
        comms = {p: bucket.comm for p, bucket in self.reducer.bucket_of.items()}
        used = used_on_any_rank(comms, self.reducer.used, self.algorithm)
        waits, self._pending = self._pending, []
        for wait in waits:
            wait()
        for bucket in self.buckets:
            bucket.write(used)
        self._unreduced = False

    # The step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None, grad_scale: float = 1.0):
        """Update this rank's chunk of every bucket, with gradients divided by `grad_scale`, and all-gather the chunks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reducer.check()
        for bucket in self.buckets:
            bucket.check()
        self.reduce_pending()
        handles = []
        for chunk in step_chunks(self._chunks, self.param_groups, grad_scale):
            handles.append(chunk.bucket.gather(self.algorithm))
        for handle in handles:
            handle.wait()
        return loss

    # Its state ------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict:
        """Return the state dict that `optimizer_cls` on one process would have, on every rank, plus "master" weights."""
        return optimizer_state.full_state_dict(self._chunks, self.param_groups)

    def load_full_state_dict(self, full: dict) -> None:
        """Load a full state, made on any number of ranks or by `optimizer_cls` itself. Load the parameters too."""
        optimizer_state.load_full_state_dict(self._chunks, self.param_groups, full)

    def state_dict(self) -> dict:
        """Return this rank's part of the state, options and master weights included; nothing is sent."""
        return optimizer_state.own_state_dict(self._chunks, self.param_groups)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load `state_dict()` of the same rank, number of ranks and buckets. Load the parameters too."""
        optimizer_state.load_own_state_dict(self._chunks, self.param_groups, state_dict)

    def __reduce_ex__(self, protocol):
        arguments.refuse_copy(
            "a ZeroOptimizer", "keep its state_dict() or full_state_dict(), and make another"
        )
