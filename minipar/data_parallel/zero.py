"""ZeRO-1 and ZeRO-2: the optimizer's state, then the gradients too, cut over the ranks that DDP would give a copy each.

`simple/zero.py`, plus buckets reduced during the backward, any elementwise torch optimizer, parameter groups, master
copies, offload, and state that moves between numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.buckets import make_buckets
from minipar.data_parallel.elementwise_optimizers import require_per_element
from minipar.data_parallel.gradient_reducer import GradientReducer
from minipar.data_parallel.offload import memory_for
from minipar.data_parallel.optimizer_state import full_state_dict, load_full_state_dict
from minipar.data_parallel.shard_optimizer import ChunkOptimizer
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.unused_parameters import used_anywhere
from minipar.errors import one_of
from minipar.mesh import Placement, placement_of, set_placement


class ZeroOptimizer(torch.optim.Optimizer):
    """Shards the state of `optimizer_cls` over p ranks; replaces DDP, since it reduces the gradients itself.

    params         parameters, named ones, or parameter groups; their values become rank 0's
    optimizer_cls  any per-element torch optimizer, or `Lamb`; `kwargs` are its arguments
    comm           the ranks that have a copy, or a function from parameter to Comm
    stage          1: optimizer state is cut. 2: gradients too, each bucket freed when it has been reduced
    reduce         "mean", for a loss that is a mean over this rank's samples; "sum", for one divided by the global count
    master_dtype   of the optimizer's own copy of the parameters, if not theirs: float32 under bf16 parameters
    reduce_dtype   in which gradients are summed; default: master_dtype
    offload        None, "cpu" or "disk": where master copy and state live between steps; `folder` for the files
    per_element    True vouches for an optimizer class that is not known here

    backward       shard.grad = 1/p * sum over ranks of grad       reduce-scatter, bucket by bucket, while it runs
    step           shard = optimizer_cls(shard, shard.grad)        then all-gather, while the next bucket is updated

    Gradients belong to `shards`: a leaf tensor per parameter, with its Placement and, after a backward, its `.grad` (None
    where no rank used the parameter). `param.grad` is None then. Under `no_sync()` they gather in `param.grad` instead.
    Parameters in the order of registration fill DDP's own buckets, so sums are DDP's bit for bit; groups that order them
    otherwise fill other buckets, cut in other places, and at 3 or more ranks sums differ in rounding.

    Sends per step (p-1)/p of every bucket twice (see buckets.py for its size; the first time in reduce_dtype) and, ring
    fashion, one byte a parameter: the same as DDP, 2P elements. Holds, in mixed precision with Adam, 4 + 12/p bytes a
    parameter in stage 1, 2 + 14/p in stage 2. Backwards outside no_sync add up in the shards: M of them send (M+1)P and
    keep stage 2's memory; under no_sync all but the last send nothing and keep full gradients, 2P in all.
    Raises ValueError for a bad argument, RuntimeError where a parameter's storage has been replaced.
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
        _check(stage, reduce, bucket_mb, first_bucket_mb)
        require_per_element(optimizer_cls, per_element)
        self.optimizer_cls, self.stage, self.reduce, self.algorithm = optimizer_cls, stage, reduce, algorithm
        defaults = optimizer_cls([nn.Parameter(torch.zeros(1))], **kwargs).defaults
        super().__init__(params, defaults)
        comm_of = (lambda _: comm) if isinstance(comm, Comm) else comm
        _place(self.param_groups)
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
        self._waits: list[Callable[[], None]] = []

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the parameters; what a gradient norm is taken of."""
        params = [p for group in self.param_groups for p in group["params"]]
        bucket_of = self.reducer.bucket_of
        return [bucket_of[p].shards[p] for p in params if p in bucket_of]

    @property
    def tensors(self) -> list[Tensor]:
        """The shards: see `Updates`."""
        return self.shards

    def states(self) -> Iterator[tuple[Tensor, dict]]:
        """Each shard, or its master copy, with its optimizer state: to be read, or replaced by tensors of its shape."""
        for chunk in self._chunks:
            for param, master in chunk.masters.items():
                set_placement(master, placement_of(chunk.bucket.shards[param]))
                yield master, chunk.optimizer.state[master]

    # Gradients ------------------------------------------------------------------------------------------------

    def no_sync(self):
        """A context whose backwards only accumulate, in full; the next one outside, or `step`, reduces the sum."""
        self._unreduced = True
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce what has been accumulated, now: for gradients that no backward outside no_sync has computed."""
        self.reducer.synchronize()

    def reduce_rest(self) -> None:
        """Reduce what no backward has reduced since the last `no_sync` or `zero_grad`."""
        if self._unreduced:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._unreduced = True
        if set_to_none:
            self.reducer.used.clear()
            for bucket in self.buckets:
                bucket.forget()
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.zero_()

    def _launch(self, bucket: ShardedBucket) -> None:
        if self.stage == 2 and len(self._waits) > 1:  # two buckets of full gradients are alive: no more
            self._waits.pop(0)()
        self._waits.append(bucket.reduce(self.reduce, self.algorithm))

    def _finish(self) -> None:
        """Wait for the sums, and give the shards their gradients."""
        used = self.reducer.used = used_anywhere(self._comm_of, self.reducer.used, self.algorithm)
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        for bucket in self.buckets:
            for param, shard in bucket.shards.items():
                shard.grad = bucket.of_chunk(param, bucket.gradient) if param in used else None
        self._unreduced = False

    # The step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None, grad_scale: float = 1.0):
        """Update the own chunk of every bucket, and gather the others'. Gradients are divided by `grad_scale` first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for bucket in self.buckets:
            bucket.check()
        self.reduce_rest()
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
        """What `optimizer_cls` on one process would have, on every rank; a master copy under the key "master"."""
        return full_state_dict(self._chunks, self.param_groups)

    def load_full_state_dict(self, full: dict) -> None:
        """Take over a full state, from any number of ranks or from `optimizer_cls` itself. Load the parameters first."""
        load_full_state_dict(self._chunks, self.param_groups, full)

    def state_dict(self) -> dict:
        """This rank's part alone: of use to the same rank of the same number of ranks."""
        return {"chunks": [chunk.optimizer.state_dict() for chunk in self._chunks]}

    def load_state_dict(self, state: dict) -> None:
        for chunk, own in zip(self._chunks, state["chunks"]):
            chunk.optimizer.load_state_dict(own)
            chunk.store()


def _place(groups: list[dict]) -> None:
    """Give parameters without a placement one: by the name in their group, if the caller gave names, else by number."""
    number = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {number + i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"]):
            if getattr(param, "placement", None) is None:
                set_placement(param, Placement.whole(name, param.shape))
        number += len(group["params"])


def _check(stage, reduce, bucket_mb, first_bucket_mb) -> None:
    if stage not in (1, 2):
        raise ValueError(f"stage={stage!r} does not exist here; use 1 or 2, or FSDP for stage 3")
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")
    if not bucket_mb > 0 or not first_bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
