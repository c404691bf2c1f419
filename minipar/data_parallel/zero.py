"""ZeRO-1 and ZeRO-2: the optimizer's state, then the gradients too, cut over the ranks that DDP would give a copy each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from minipar.comm import Comm
from minipar.data_parallel.buckets import make_buckets
from minipar.data_parallel.elementwise_optimizers import require_per_element
from minipar.data_parallel.offload import memory_for
from minipar.data_parallel.optimizer_state import full_state_dict, load_full_state_dict
from minipar.data_parallel.shard_optimizer import ChunkOptimizer
from minipar.data_parallel.sharded_bucket import ShardedBucket
from minipar.data_parallel.unused_parameters import used_anywhere
from minipar.errors import one_of
from minipar.mesh import Placement, placement_of, set_placement


class ZeroOptimizer(torch.optim.Optimizer):
    """`optimizer_cls`, of whose state each of p ranks keeps a p-th part; it reduces the gradients itself, so no DDP.

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
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self._comm_of = {p: bucket.comm for p, bucket in self._bucket_of.items()}
        self._used: set[nn.Parameter] = set()  # since the last zero_grad, by any rank
        self._synchronised = True
        self._unreduced = True
        self._begin()
        for param in trained:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def shards(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the parameters; what a gradient norm is taken of."""
        params = [p for group in self.param_groups for p in group["params"]]
        return [self._bucket_of[p].shards[p] for p in params if p in self._bucket_of]

    def shard_states(self) -> Iterator[tuple[Tensor, dict]]:
        """Each shard, or its master copy, with its optimizer's state: to be read, or replaced by tensors of its shape."""
        for chunk in self._chunks:
            for param, master in chunk.masters.items():
                set_placement(master, placement_of(chunk.bucket.shards[param]))
                yield master, chunk.optimizer.state[master]

    # Gradients ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self):
        """Backwards inside only accumulate, in full; the next one outside, or `step`, reduces the sum."""
        before, self._synchronised = self._synchronised, False
        self._unreduced = True
        try:
            yield
        finally:
            self._synchronised = before

    def synchronize(self) -> None:
        """Reduce what has been accumulated, now: for gradients that were not computed by a backward outside no_sync."""
        self._begin()
        self._finish()

    def reduce_rest(self) -> None:
        """Reduce what no backward has reduced since the last `no_sync` or `zero_grad`."""
        if self._unreduced:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._unreduced = True
        if set_to_none:
            self._used.clear()
            for bucket in self.buckets:
                bucket.forget()
        for shard in self.shards:
            if shard.grad is not None:
                shard.grad.zero_()

    def _begin(self) -> None:
        self._armed = False
        self._launched = 0  # buckets leave in their order, the same on every rank
        self._waits: list[Callable[[], None]] = []
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}

    def _on_gradient(self, param: nn.Parameter) -> None:
        bucket = self._bucket_of[param]
        self._used.add(param)
        bucket.collect(param)
        if not self._synchronised:
            return
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._finish)
        self._missing[bucket].discard(param)
        while self._launched < len(self.buckets) and not self._missing[self.buckets[self._launched]]:
            self._launch(self.buckets[self._launched])

    def _launch(self, bucket: ShardedBucket) -> None:
        for param in self._missing[bucket]:
            if param.grad is not None:
                self._used.add(param)
            bucket.collect(param)
        self._launched += 1
        if self.stage == 2 and len(self._waits) > 1:  # two buckets of full gradients are alive: no more
            self._waits.pop(0)()
        self._waits.append(bucket.reduce(self.reduce, self.algorithm))

    def _finish(self) -> None:
        """Send what is left, wait for everything, and give the shards their gradients."""
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        self._used = used_anywhere(self._comm_of, self._used, self.algorithm)
        for wait in self._waits:
            wait()
        for bucket in self.buckets:
            for param, shard in bucket.shards.items():
                used = param in self._used
                shard.grad = bucket.of_chunk(param, bucket.gradient) if used else None
        self._unreduced = False
        self._begin()

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
