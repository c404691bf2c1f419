"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged over the p ranks.

    grad = 1/p * sum over ranks of grad

`average_gradients` does this after the backward. `DDP` does it during the backward, in buckets of parameters, last layers
first, because their gradients are ready first:

    backward     |  layer 4  |  layer 3  |  layer 2  |  layer 1  |
    all-reduce               |-- bucket 0 --|        |-- bucket 1 --|-- bucket 2 --|  wait for all

Every rank starts the buckets in the same order: collectives started in different orders hang, or mix up their data. A ring
all-reduce sends 2(p-1)/p of the gradients per rank.

In the library: minipar.DDP, which adds buckets by dtype, unused and frozen parameters, no_sync, recovery after exceptions.
Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
"""

import torch
from torch import nn


def average_gradients(module, comm):
    """Average after the backward, with one all-reduce per parameter: correct, but nothing overlaps."""
    for param in module.parameters():
        param.grad = comm.all_reduce(param.grad, "mean")


class Bucket:
    """Parameters whose gradients are reduced together. `pending`: those without a gradient in this backward so far."""

    def __init__(self, params):
        self.params = params
        self.pending = set(params)
        self.handle = None  # the handle of its all-reduce, once started

    def start(self, comm):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        self.handle = comm.all_reduce(flat, "mean", async_op=True)

    def finish(self):
        averaged = self.handle.wait().split([p.numel() for p in self.params])
        for param, grad in zip(self.params, averaged):
            param.grad = grad.view_as(param)


class DDP(nn.Module):
    """Wrap `module` so that `backward()` gives averaged gradients. All ranks start with rank 0's parameters and buffers."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__()
        self.module, self.comm = module, comm
        params = list(module.parameters())  # yields a tied weight only once
        if any(not p.requires_grad for p in params):
            raise ValueError("a frozen parameter: this DDP trains all of them; minipar.DDP does not have to")
        if len({p.dtype for p in params}) > 1:
            raise ValueError("parameters of several dtypes: minipar.DDP makes buckets for each")
        for tensor in [*params, *module.buffers()]:
            tensor.data.copy_(comm.broadcast(tensor.data))
        self.groups = [[]]  # the parameters of each bucket
        for param in reversed(params):
            if self.groups[-1] and sum(p.nbytes for p in [*self.groups[-1], param]) > bucket_mb * 2**20:
                self.groups.append([])
            self.groups[-1].append(param)
            param.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *args, **kwargs):
        self.buckets = [Bucket(params) for params in self.groups]
        self.in_backward = False
        return self.module(*args, **kwargs)

    def _gradient_is_ready(self, param):  # a hook: autograd calls it during the backward
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = next(b for b in self.buckets if any(p is param for p in b.params))
        if param not in bucket.pending:
            raise ValueError("a gradient came twice: use minipar.DDP and its no_sync() to accumulate")
        bucket.pending.remove(param)
        for bucket in self.buckets:  # in order: an incomplete bucket delays the buckets after it
            if bucket.pending:
                break
            if bucket.handle is None:
                bucket.start(self.comm)

    def _finish(self):  # autograd calls it when the backward ends
        if any(bucket.pending for bucket in self.buckets):
            raise ValueError("a parameter got no gradient: use minipar.DDP, which knows of unused parameters")
        for bucket in self.buckets:
            bucket.finish()
