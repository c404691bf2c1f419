"""DDP: every rank computes gradients on its part of the batch; they are reduced while the backward is still running.

`simple/ddp.py`, plus buckets by dtype and Comm, unused and frozen parameters, no_sync, and recovery from exceptions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from minipar.comm import Comm
from minipar.data_parallel.buckets import Bucket, make_buckets
from minipar.data_parallel.gradient_reducer import GradientReducer, arm_on_backward
from minipar.errors import one_of
from minipar.mesh import place_whole, placement_of, set_placement


class DDP(nn.Module):
    """A wrapped module whose gradients are the mean (or the sum) over ranks by the time `backward()` returns.

    module      any module; its parameters and buffers become rank 0's
    comm        the ranks that hold a replica, or a function from parameter to Comm (experts have fewer replicas)
    bucket_mb   the most megabytes (of 2**20 bytes) in a bucket; in the first one, `first_bucket_mb` if that is less
    reduce      "mean", as torch's DDP: for a loss that is a mean over this rank's samples.
                "sum": for a loss already divided by the global number of tokens
    algorithm   of the all-reduce

    forward     the module's
    backward    grad = 1/p * sum over ranks of grad; bucket by bucket, waited for at the very end

    A parameter that no rank used keeps the gradient that `zero_grad` gave it, None or zero. A parameter that only some
    ranks used counts as zero on the other ranks. Gradients are views of the buckets. Accumulate under `no_sync()`: a
    gradient that an earlier backward has already reduced would be reduced again.

    Sends per step 2(p-1)/p of each bucket: its gradients, each rounded up to 64 bytes, one flag per parameter in the last
    bucket (the usage bitmap), rounded up to 64p bytes.
    Raises ValueError for a bad argument; RuntimeError where a gradient changes after its bucket was reduced.
    Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | Callable[[Tensor], Comm],
        bucket_mb: float = 25.0,
        reduce: str = "mean",
        algorithm: str = "auto",
        first_bucket_mb: float = 1.0,
        axis: str = "dp",
    ):
        super().__init__()
        if reduce not in ("mean", "sum"):
            raise ValueError(f"reduce={reduce!r} is unknown; use {one_of(('mean', 'sum'))}")
        if not bucket_mb > 0 or not first_bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
        self.module, self.reduce, self.algorithm = module, reduce, algorithm
        comm_of = (lambda _: comm) if isinstance(comm, Comm) else comm
        self._broadcast_from_rank0(comm_of, axis)
        trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = make_buckets(
            trained, comm_of, int(bucket_mb * 2**20), int(min(bucket_mb, first_bucket_mb) * 2**20)
        )
        self.reducer = GradientReducer(self.buckets, self._launch, self._finish)
        self._handles = []

    def forward(self, *args, **kwargs):
        self.reducer.reset_after_error()
        outputs = self.module(*args, **kwargs)
        if not (torch.is_grad_enabled() and self.reducer.synchronised):
            return outputs
        end = self.reducer.end
        return tree_map_only(Tensor, lambda x: arm_on_backward(x, end) if x.requires_grad else x, outputs)

    def no_sync(self):
        """A context whose backwards only accumulate; the next backward outside reduces the sum."""
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self.reducer.synchronize()

    def _launch(self, bucket: Bucket) -> None:
        if bucket.flagged:
            used = [float(p.grad is not None) for p in bucket.flagged]
            bucket.flags.copy_(torch.tensor(used))
        reduce = bucket.comm.all_reduce_
        self._handles.append(reduce(bucket.flat, self.reduce, algorithm=self.algorithm, async_op=True))

    def _finish(self) -> None:
        """Wait for the all-reduces. A parameter that only other ranks used gets its gradient here too."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        for bucket in self.buckets:
            for param, used in zip(bucket.flagged, bucket.flags.tolist()):
                if used and param.grad is None:
                    param.grad = self.reducer.bucket_of[param].views[param]

    @torch.no_grad()
    def _broadcast_from_rank0(self, comm_of, axis: str) -> None:
        place_whole(self.module)
        for param in self.module.parameters():
            set_placement(param, placement_of(param).replicate(axis))
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            tensor.copy_(comm_of(tensor).broadcast(tensor))
