"""ZeRO-1 and ZeRO-2: the optimizer's state, then the gradients too, are sharded over the ranks that are DDP's replicas.

`simple/zero.py`, plus buckets reduced during the backward, unused parameters, parameter groups, master copies, LAMB,
offload, and a state dict that can be loaded on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.buckets import make_buckets
from minipar.data_parallel.chunk_optimizer import ChunkOptimizer
from minipar.data_parallel.elementwise_optimizers import require_per_element
from minipar.data_parallel.gradient_reducer import GradientReducer
from minipar.data_parallel.offload import memory_for
from minipar.data_parallel.optimizer_state import full_state_dict, load_full_state_dict
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.unused_parameters import used_on_any_rank
from minipar.errors import one_of
from minipar.mesh import Placement, placement_of, set_placement


class ZeroOptimizer(torch.optim.Optimizer):
    """Shard the state of `optimizer_cls` over p ranks. Replaces DDP, since it reduces the gradients itself.

    params         parameters, (name, parameter) pairs, or parameter groups; every rank gets rank 0's values
    optimizer_cls  any per-element torch optimizer, or `Lamb`; `kwargs` are its arguments
    comm           the ranks that hold a replica, or a function from parameter to Comm
    stage          1: optimizer state is sharded. 2: gradients too, each bucket freed when it has been reduced
    reduce         "mean", for a loss that is a mean over this rank's samples; "sum", for one divided by the global count
    master_dtype   of master weights, if not the parameters' own dtype: float32 for bf16 parameters
    reduce_dtype   of the gradient reduction; default: master_dtype
    offload        None, "cpu" or "disk": the memory of master weights and state; `folder` for the files
    per_element    True: accept an optimizer class that is not known to update each element from that element alone

    backward       shard.grad = 1/p * sum over ranks of grad       reduce-scatter, bucket by bucket, during the backward
    step           shard = optimizer_cls(shard, shard.grad)        then all-gather, while the next bucket is updated

    After a backward, gradients are in `shards`, a leaf tensor with a Placement per parameter: `shard.grad` (None where no
    rank used the parameter). `param.grad` is then None. Under `no_sync()` they accumulate in `param.grad` instead.
    Parameters in the order of registration fill the same buckets as in DDP, so the sums are bitwise DDP's. Parameters
    that groups put in another order fill other buckets with other chunks: on 3 or more ranks, rounding differs.

    Sends per step (p-1)/p of every bucket twice (see buckets.py for its size; the first time in reduce_dtype), and an
    all-reduce of one byte per parameter. In all 2P elements, as DDP. Holds, in mixed precision with Adam, 4 + 12/p bytes
    per parameter in stage 1, and 2 + 14/p in stage 2. Backwards outside no_sync accumulate in the shards: M of them send
    (M+1)P elements, and the memory of stage 2 stays as above. Under no_sync, all but the last send nothing, so that M
    backwards send 2P, but full gradients are held.
    Raises ValueError for a bad argument, RuntimeError where a parameter's storage was replaced.
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
        **kwargs,
    ):
        _check_arguments(stage, reduce, bucket_mb, first_bucket_mb)
        require_per_element(optimizer_cls, per_element)
        self.optimizer_cls, self.stage, self.reduce, self.algorithm = optimizer_cls, stage, reduce, algorithm
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **kwargs).defaults
        super().__init__(params, defaults)
        comm_of = (lambda _: comm) if isinstance(comm, Comm) else comm
        _set_default_placements(self.param_groups)
        every = [p for group in self.param_groups for p in group["params"]]
        trained = [p for p in every if p.requires_grad]
        for frozen in (p for p in every if not p.requires_grad):
            frozen.data.copy_(comm_of(frozen).broadcast(frozen.data))
        memory = memory_for(offload, folder)
        self._chunks = []
        for bucket in make_buckets(trained, comm_of, int(bucket_mb * 2**20), int(first_bucket_mb * 2**20)):
            dtype = bucket.flat.dtype
            wide = master_dtype or dtype
            sharded = ShardedBucket(bucket, stage == 1, reduce_dtype or wide, axis)
            self._chunks.append(ChunkOptimizer(sharded, optimizer_cls, self.param_groups, wide, memory))
        self.buckets = [chunk.bucket for chunk in self._chunks]
        self.reducer = GradientReducer(self.buckets, self._launch, self._finish)
        self._comm_of = {p: bucket.comm for p, bucket in self.reducer.bucket_of.items()}
        self._unreduced = True
        self._pending: list[Callable[[], None]] = []

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the parameters: take gradient norms of these."""
        params = [p for group in self.param_groups for p in group["params"]]
        bucket_of = self.reducer.bucket_of
        return [bucket_of[p].shards[p] for p in params if p in bucket_of]

    @property
    def tensors(self) -> list[Tensor]:
        """The shards: see `OptimizerInterface`."""
        return self.shards

    def tensors_and_states(self) -> Iterator[tuple[Tensor, dict]]:
        """Yield each shard, or its master copy, and its optimizer state, to be read or replaced by tensors of its shape."""
        for chunk in self._chunks:
            for param, master in chunk.masters.items():
                set_placement(master, placement_of(chunk.bucket.shards[param]))
                yield master, chunk.optimizer.state[master]

    # Gradients ------------------------------------------------------------------------------------------------

    def no_sync(self):
        """A context whose backwards only accumulate full gradients; the next one outside, or `step`, reduces the sum."""
        self._unreduced = True
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self.reducer.synchronize()

    def reduce_pending(self) -> None:
        """Reduce the accumulated gradients, unless a backward has done so since the last `no_sync` or `zero_grad`."""
        if self._unreduced:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._unreduced = True
        if set_to_none:
            self.reducer.used.clear()
            for bucket in self.buckets:
                bucket.discard_grads()
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.zero_()

    def _launch(self, bucket: ShardedBucket) -> None:
        # At most two reduce-scatters at a time, since each holds a bucket of full gradients.
        if self.stage == 2 and len(self._pending) > 1:
            self._pending.pop(0)()
        self._pending.append(bucket.reduce(self.reduce, self.algorithm))

    def _finish(self) -> None:
        """Wait for the reduce-scatters, and set the shards' `.grad`."""
        used = self.reducer.used = used_on_any_rank(self._comm_of, self.reducer.used, self.algorithm)
        waits, self._pending = self._pending, []
        for wait in waits:
            wait()
        for bucket in self.buckets:
            for param, shard in bucket.shards.items():
                shard.grad = bucket.slice_of_chunk(param, bucket.gradient) if param in used else None
        self._unreduced = False

    # The step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None, grad_scale: float = 1.0):
        """Update this rank's chunk of every bucket, with gradients divided by `grad_scale`, and all-gather the chunks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for bucket in self.buckets:
            bucket.check()
        self.reduce_pending()
        handles = []
        for chunk, following in zip(self._chunks, [*self._chunks[1:], None]):
            if following is not None:
                following.prefetch()
            chunk.step(self.param_groups, grad_scale)
            bucket = chunk.bucket
            gather = partial(bucket.comm.all_gather, algorithm=self.algorithm, async_op=True)
            handles.append(gather(bucket.own, out=bucket.flat))
        for handle in handles:
            handle.wait()
        return loss

    def full_state_dict(self) -> dict:
        """Return the state dict that `optimizer_cls` on one process would have, on every rank, plus "master" weights."""
        return full_state_dict(self._chunks, self.param_groups)

    def load_full_state_dict(self, full: dict) -> None:
        """Load a full state, made on any number of ranks or by `optimizer_cls` itself. Load the parameters first."""
        load_full_state_dict(self._chunks, self.param_groups, full)

    def state_dict(self) -> dict:
        """Return this rank's part only, to be loaded by the same rank of the same number of ranks."""
        return {"chunks": [chunk.optimizer.state_dict() for chunk in self._chunks]}

    def load_state_dict(self, state: dict) -> None:
        for chunk, own in zip(self._chunks, state["chunks"]):
            chunk.optimizer.load_state_dict(own)
            chunk.offload_state()


def _set_default_placements(groups: list[dict]) -> None:
    """Give each parameter without a Placement one, under its name in its group or, where it has none, its number."""
    number = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {number + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"]):
            if getattr(param, "placement", None) is None:
                set_placement(param, Placement.whole(name, param.shape))
        number += len(group["params"])


def _check_arguments(stage, reduce, bucket_mb, first_bucket_mb) -> None:
    if stage not in (1, 2):
        raise ValueError(f"stage={stage!r} does not exist here; use 1 or 2, or FSDP for stage 3")
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")
    if not bucket_mb > 0 or not first_bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
