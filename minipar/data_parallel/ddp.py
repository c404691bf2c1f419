"""DDP: every rank computes gradients on its part of the batch; they are reduced while the backward is still running."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.utils._pytree import tree_map_only

from minipar.comm import Comm
from minipar.data_parallel.buckets import Bucket, make_buckets
from minipar.errors import one_of
from minipar.mesh import place_whole, placement_of, set_placement


class DDP(nn.Module):
    """The module, with gradients that are the mean (or the sum) over ranks by the time `backward()` returns.

    module      any module; its parameters and buffers become rank 0's
    comm        the ranks that have a copy, or a function from parameter to Comm (experts are copied on fewer ranks)
    bucket_mb   how many megabytes (of 2**20 bytes) are reduced at once; `first_bucket_mb` for the first
    reduce      "mean", as torch's DDP: for a loss that is a mean over this rank's samples.
                "sum": for a loss already divided by the global number of tokens
    algorithm   of the all-reduce

    forward     the module's
    backward    grad = 1/p * sum over ranks of grad, launched bucket by bucket, waited for at the very end

    A parameter that no rank used keeps the gradient it had (None after zero_grad); one that some ranks used counts as
    zero on the others. Gradients are views of the buckets. Accumulate under `no_sync()`: a gradient left from an earlier
    synchronised backward would be reduced a second time.

    Sends per step 2(p-1)/p of each bucket: its gradients, each rounded up to 64 bytes, one flag per parameter in the last
    bucket (the usage bitmap), rounded up to 64p bytes.
    Raises ValueError for a bad argument; RuntimeError where a gradient arrives after its bucket has left.
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
        self._start_alike(comm_of, axis)
        trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = make_buckets(trained, comm_of, int(bucket_mb * 2**20), int(first_bucket_mb * 2**20))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self._synchronised = True
        self._begin()
        for param in trained:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *args, **kwargs):
        if self._armed and not _in_backward():
            self._begin()  # an exception ended the last backward before its end
        outputs = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return outputs
        return tree_map_only(Tensor, lambda x: _Notice.apply(x, self) if x.requires_grad else x, outputs)

    @contextmanager
    def no_sync(self):
        """Backwards inside only accumulate; the next one outside reduces the sum."""
        before, self._synchronised = self._synchronised, False
        try:
            yield
        finally:
            self._synchronised = before

    def synchronize(self) -> None:
        """Reduce what has been accumulated, now: for gradients that were not computed by a backward outside no_sync."""
        self._begin()
        self._finish()

    # During a backward -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._armed = False
        self._launched = 0  # buckets leave in their order, the same on every rank
        self._handles = []
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}

    def _arm(self) -> None:
        """The first gradient of a backward asks autograd to call `_finish` after its last."""
        if self._synchronised and not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._finish)

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self._synchronised:
            return
        self._arm()
        bucket = self._bucket_of[param]
        if param not in self._missing[bucket]:
            raise RuntimeError(
                f"the gradient of {placement_of(param).name} changed after its bucket was reduced: "
                "it was used in a nested backward (reentrant checkpointing?)"
            )
        bucket.collect(param)
        self._missing[bucket].discard(param)
        while self._launched < len(self.buckets) and not self._missing[self.buckets[self._launched]]:
            self._launch(self.buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        for param in self._missing[bucket]:
            bucket.collect(param)
        if bucket.flagged:
            used = [float(p.grad is not None) for p in bucket.flagged]
            bucket.flags.copy_(torch.tensor(used))
        self._launched += 1
        self._handles.append(
            bucket.comm.all_reduce_(bucket.flat, self.reduce, algorithm=self.algorithm, async_op=True)
        )

    def _finish(self) -> None:
        """Send what is left, wait for everything, and give the parameters their gradients."""
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        for handle in self._handles:
            handle.wait()
        for bucket in self.buckets:
            for param, used in zip(bucket.flagged, bucket.flags.tolist()):
                if used and param.grad is None:
                    param.grad = self._bucket_of[param].views[param]
        self._begin()

    # Before the first --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_alike(self, comm_of, axis: str) -> None:
        place_whole(self.module)
        for param in self.module.parameters():
            set_placement(param, placement_of(param).replicate(axis))
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            tensor.copy_(comm_of(tensor).broadcast(tensor))


class _Notice(Function):
    """The identity, whose backward arms DDP: so a rank on which no parameter gets a gradient still takes part."""

    @staticmethod
    def forward(ctx, x, ddp):
        ctx.ddp = ddp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.ddp._arm()
        return grad, None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
