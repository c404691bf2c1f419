"""DDP: every rank computes gradients on its part of the batch; they are reduced while the backward is still running.

`simple/ddp.py`, plus buckets by dtype and Comm, unused, frozen and thawed parameters, buffers that change, no_sync, and
recovery from exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.data_parallel.arguments import (
    bucket_sizes,
    function_of_parameter,
    refuse_copy,
    require_reduce,
    require_whole,
)
from minipar.data_parallel.buckets import Bucket, make_buckets
from minipar.data_parallel.buffers import copy_buffers_of_rank0
from minipar.data_parallel.compress.plain_mean import Compressors
from minipar.data_parallel.gradient_reducer import GradientReducer, arm_on_backward, in_backward
from minipar.mesh import place_whole, placement_of, set_placement
from minipar.staging import to_device


class DDP(nn.Module):
    """A wrapped module whose gradients are the mean (or the sum) over ranks by the time `backward()` returns.

    module      any module; its parameters and buffers become rank 0's
    comm        the ranks that hold a replica, or a function from parameter to Comm (experts have fewer replicas)
    bucket_mb   the most megabytes (of 2**20 bytes) in a bucket; in the first one, `first_bucket_mb` if that is less
    reduce      "mean", as torch's DDP: for a loss that is a mean over this rank's samples.
                "sum": for a loss already divided by the global number of tokens
    algorithm   of the all-reduce
    broadcast_buffers   make the buffers (running means, say) rank 0's before each forward
    reduce_dtype        of the gradient reduction, whose result is rounded to the parameters' dtype; default: that
    compress    a function from Comm to what averages gradients with fewer bytes, such as `compress.PowerSGD` or
                `partial(compress.CompressedMean, codec=Sign())`; `compressors` has them, with their residuals. While
                `compressors.on` is False, gradients are reduced as they are: a warm-up. Over one rank nothing is compressed

    forward     the module's
    backward    grad = 1/p * sum over ranks of grad; bucket by bucket, waited for at the very end

    A parameter that no rank used keeps its gradient: None or zero after `zero_grad`. A parameter that only some ranks used
    counts as zero on the other ranks. Gradients are views of the buckets. Accumulate under `no_sync()`: a gradient that
    an earlier backward has already reduced would be reduced again. Parameters thawed or added after wrapping get rank 0's
    values and buckets of their own at the next forward. Set broadcast_buffers=False where two forwards come before a
    backward and the model changes buffers that its backward needs.

    Sends per step 2(p-1)/p of each bucket: its gradients, each rounded up to 64 bytes, one flag per parameter in the last
    bucket (the usage bitmap), rounded up to 64p bytes. A forward with gradients and outside `no_sync` broadcasts the
    buffers: all ranks together send their bytes p-1 times.
    Raises ValueError for a bad argument; RuntimeError where a gradient changes after its bucket was reduced, is sparse, or
    where a later DDP or ZeroOptimizer was made for a parameter; TypeError for a copy of the wrapper.
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
        broadcast_buffers: bool = True,
        reduce_dtype: torch.dtype | None = None,
        compress: Callable[[Comm], object] | None = None,
    ):
        super().__init__()
        require_reduce(reduce)
        self._bucket_sizes = bucket_sizes(bucket_mb, first_bucket_mb)
        self.module, self.reduce, self.algorithm, self.axis = module, reduce, algorithm, axis
        self.broadcast_buffers, self.reduce_dtype = broadcast_buffers, reduce_dtype
        self.compressors = Compressors(compress)
        self._comm_of = function_of_parameter(comm)
        self._handles: list = []
        self._sent: list[
            tuple[Bucket, Tensor]
        ] = []  # for each handle, what it reduces: `flat`, or that in reduce_dtype
        self.reducer = GradientReducer([], self._launch, self._finish, "DDP")
        self.buckets: list[Bucket] = self.reducer.buckets
        self._add(list(module.parameters()))
        copy_buffers_of_rank0(module, [self._comm_of])

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not in_backward():  # not a recomputation
            self._before_forward()
        outputs = self.module(*args, **kwargs)
        if self.reducer.synchronised:
            arm_on_backward(outputs, self.reducer.end)
        return outputs

    def _before_forward(self) -> None:
        self.reducer.reset_after_error()
        self._add(
            [p for p in self.module.parameters() if p.requires_grad and p not in self.reducer.bucket_of]
        )
        if self.broadcast_buffers and self.reducer.synchronised:
            copy_buffers_of_rank0(self.module, [self._comm_of])

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards only accumulate; the next backward outside reduces the sum."""
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now, for when no backward outside `no_sync()` follows to do so."""
        self.reducer.synchronize()

    def _launch(self, bucket: Bucket) -> None:
        if bucket.flagged:
            used = [float(p in self.reducer.used) for p in bucket.flagged]
            bucket.flags.copy_(to_device(torch.tensor(used), bucket.flags.device))
        sent = bucket.flat if self.reduce_dtype is None else bucket.flat.to(self.reduce_dtype)
        self._sent.append((bucket, sent))
        if (average := self.compressors.of(bucket.comm)) is not None:
            reduce = partial(self._reduce_compressed, bucket, sent, average)
            self._handles.append(bucket.comm.custom("compressed_all_reduce", reduce, async_op=True))
            return
        reduce = bucket.comm.all_reduce_
        self._handles.append(reduce(sent, self.reduce, algorithm=self.algorithm, async_op=True))

    def _reduce_compressed(self, bucket: Bucket, sent: Tensor, average) -> None:
        bucket.average(sent, average, self.reduce)
        if bucket.flagged and not getattr(average, "sends_nothing", False):
            bucket.comm.all_reduce_(sent[bucket.flags.storage_offset() :])

    def _finish(self) -> None:
        """Wait for the all-reduces. A parameter that only other ranks used gets its gradient here too."""
        launched = list(zip(self._handles, self._sent))
        self._handles, self._sent = [], []
        for handle, (bucket, sent) in launched:
            handle.wait()
            if sent is not bucket.flat:
                bucket.flat.copy_(sent)
        for bucket in self.buckets:
            # Where this rank used every parameter, a GPU need not be waited for.
            used_all = self.reducer.used.issuperset(bucket.flagged)
            for param, used in zip(
                bucket.flagged, [1] * len(bucket.flagged) if used_all else bucket.flags.tolist()
            ):
                self.reducer.bucket_of[param].write(param, bool(used))

    @torch.no_grad()
    def _add(self, params: list[nn.Parameter]) -> None:
        """Give the parameters rank 0's values and, where they are trained, buckets."""
        if not params:
            return
        place_whole(self.module)
        require_whole(params, "DDP")
        for param in params:
            set_placement(param, placement_of(param).replicate(self.axis))
            param.copy_(self._comm_of(param).broadcast(param))
        trained = [p for p in params if p.requires_grad]
        self.reducer.add(make_buckets(trained, self._comm_of, *self._bucket_sizes))

    def __reduce_ex__(self, protocol):
        refuse_copy("DDP", "copy its .module, and wrap the copy if it is to be trained")
