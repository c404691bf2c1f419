"""DDP: every rank computes gradients on its part of the batch; they are reduced while the backward is still running.

Adds to `simple/ddp.py`: buckets by dtype and Comm; unused, frozen and thawed parameters; buffers that change; no_sync;
and recovery from exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # public torch.compiler.disable would import Dynamo here

from minipar.comm import Comm
from minipar.data_parallel.arguments import (
    CommOf,
    bucket_sizes,
    function_of_parameter,
    refuse_copy,
    require_same_parameters,
    require_whole,
)
from minipar.data_parallel.backward_end import arm_on_backward, in_backward
from minipar.data_parallel.buckets import Bucket, make_buckets
from minipar.data_parallel.buffers import copy_buffers_of_rank0
from minipar.data_parallel.gradient_reducer import GradientReducer
from minipar.data_parallel.reductions import ReduceBucket, ReduceOptions
from minipar.mesh import place_whole, placement_of, set_placement


class DDP(nn.Module):
    """A wrapped module whose gradients are the mean (or the sum) over ranks by the time `backward()` returns.

    module      any module; every rank gets rank 0's parameters and buffers
    comm        the ranks that hold a replica, or a function from parameter to Comm (experts have fewer replicas)
    bucket_mb   the largest size of a bucket, in MB of 2**20 bytes; for the first bucket, `first_bucket_mb` if that is less
    reduce      "mean", as torch's DDP: for a loss that is a mean over this rank's samples.
                "sum": for a loss already divided by the global number of tokens
    algorithm   the algorithm of the all-reduce
    broadcast_buffers   copy rank 0's buffers (running means, say) to the other ranks before each forward
    reduce_dtype        the dtype in which gradients are summed, over ranks and over backwards; default: the parameters'
                        dtype, to which the result is always rounded
    reduce_bucket   what starts to reduce a bucket, in place of `reduce_plainly`: see reductions.py

    forward     the module's forward. Keep the wrapper: once it is dropped, backwards reduce nothing
    backward    grad = 1/p * sum over ranks of grad: bucket by bucket, all waited for at the end

    A parameter that no rank used keeps its gradient: None or zero after `zero_grad`. Where only some ranks used a
    parameter, the rest add nothing to its gradient. Gradients are views of the buckets. Accumulate under `no_sync()`;
    otherwise a gradient that an earlier backward has reduced is reduced again, on all ranks if any rank has added to it.
    Gradients of `torch.autograd.grad` are not reduced. Parameters thawed or added after wrapping, on all ranks alike,
    get rank 0's values, and buckets of their own, at the next forward. Set broadcast_buffers=False if two forwards come
    before a backward and the model changes buffers that its backward needs. BatchNorm has the mean and variance of this
    rank's samples, so it differs from one process, as under torch's DDP. There is no SyncBatchNorm and no `join`: use
    LayerNorm or GroupNorm, and give every rank equally many batches.

    Where gradients accumulate in a reduce_dtype wider than the parameters', they are held in it, too: for float32, 4 bytes
    more per parameter from the second backward on, and as long as further ones could be added.
    Sends at construction a digest of 16 bytes to each other rank, the parameters and the buffers. Sends per step 2(p-1)/p
    of each bucket: its gradients, each rounded up to 64 bytes, and in the last bucket one flag per parameter (the usage
    bitmap); the bucket is rounded up to 64p bytes. A forward with gradients and outside `no_sync` broadcasts the buffers:
    all ranks together send the bytes of the buffers p-1 times.
    Raises ValueError for a bad argument, and if the ranks' modules or options differ; RuntimeError if a gradient is
    sparse, or changes after its bucket was reduced, or if a later DDP or ZeroOptimizer was made for a parameter;
    TypeError for a copy of the wrapper.
    Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | CommOf,
        bucket_mb: float = 25.0,
        reduce: str = "mean",
        algorithm: str = "auto",
        first_bucket_mb: float = 1.0,
        axis: str = "dp",
        broadcast_buffers: bool = True,
        reduce_dtype: torch.dtype | None = None,
        reduce_bucket: ReduceBucket | None = None,
    ):
        super().__init__()
        self._options = ReduceOptions.of(reduce, algorithm, reduce_dtype, reduce_bucket)
        self._bucket_sizes = bucket_sizes(bucket_mb, first_bucket_mb)
        self.module, self.axis, self.broadcast_buffers = module, axis, broadcast_buffers
        self._comm_of = function_of_parameter(comm)
        self.reducer: GradientReducer[Bucket] = GradientReducer("DDP", self._finish, self._leave_buckets)
        self.buckets = self.reducer.buckets
        shared = dict(
            reduce=reduce, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb, algorithm=algorithm,
            reduce_dtype=reduce_dtype, broadcast_buffers=broadcast_buffers, reduce_bucket=reduce_bucket is not None,
        )  # fmt: skip
        self._add(list(module.parameters()), module.named_buffers(), shared)
        copy_buffers_of_rank0(module, [self._comm_of])

    @_disable_dynamo(recursive=False)  # torch.compile(DDP(module)) traces the module alone
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if not in_backward():  # not a recomputation
            self._before_forward()
        outputs = self.module(*args, **kwargs)
        if self.reducer.synchronised:
            # A method of the wrapper, not of `end`: the hook keeps the wrapper alive until this backward has run.
            arm_on_backward(outputs, self._arm)
        return outputs

    def _arm(self) -> None:
        if self.reducer.synchronised:  # the backward may be inside `no_sync`, though its forward was not
            self.reducer.end.arm()

    def _before_forward(self) -> None:
        self.reducer.check()
        self.reducer.reset_after_error()
        self._add(
            [p for p in self.module.parameters() if p.requires_grad and p not in self.reducer.bucket_of]
        )
        if self.broadcast_buffers and self.reducer.synchronised:
            copy_buffers_of_rank0(self.module, [self._comm_of])

    def _leave_buckets(self) -> None:
        """After an exception, let no gradient be where all-reduces under way write: the caller may zero it in place."""
        for bucket, _ in self.reducer.under_way:
            for param in bucket.params:
                if param.grad is not None:
                    param.grad = param.grad.clone()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only accumulate gradients; the next backward outside it reduces the sum."""
        return self.reducer.no_sync()

    def synchronize(self) -> None:
        """Reduce the accumulated gradients now. Call it if the last backward ran inside `no_sync()`."""
        self.reducer.synchronize()

    def _finish(self) -> None:
        """Write the gradients. A parameter that only other ranks used gets its gradient here too."""
        for bucket in self.buckets:
            # Where this rank used every parameter, the flags need not be read from the GPU.
            used_all = self.reducer.used.issuperset(bucket.flagged)
            flags = [1] * len(bucket.flagged) if used_all else bucket.flags.tolist()
            for param, used in zip(bucket.flagged, flags):
                self.reducer.bucket_of[param].write(param, bool(used))

    @torch.no_grad()
    def _add(
        self,
        params: list[nn.Parameter],
        buffers: Iterable[tuple[str, Tensor]] = (),
        shared: Mapping[str, object] = {},
    ) -> None:
        """Copy rank 0's values to the parameters, and put the trained ones into buckets. `shared` is equal on all ranks."""
        if not params:
            return
        place_whole(self.module)
        require_whole(params, "DDP")
        named = [(placement_of(p).name, p) for p in params]
        require_same_parameters(self._comm_of, [*named, *buffers], shared)
        for param in params:
            set_placement(param, placement_of(param).replicate(self.axis))
            param.copy_(self._comm_of(param).broadcast(param))
        trained = [p for p in params if p.requires_grad]
        make = partial(Bucket, options=self._options)
        self.reducer.add(make_buckets(trained, self._comm_of, *self._bucket_sizes, make))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy("DDP", "copy its .module, and wrap the copy if it is to be trained")
