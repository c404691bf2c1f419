"""Data parallelism: every rank has the whole model and a part of the batch; gradients are averaged over the p ranks.

    grad = 1/p * sum over ranks of grad

`average_gradients` does this after the backward. `DDP` does it during the backward. It groups the parameters into buckets,
last layers first, because their gradients are ready first. When all gradients of a bucket are ready, its all-reduce starts
and the backward continues; only at the end of the backward does a rank wait. Every rank starts the buckets in the same
order: collectives started in different orders hang, or mix up their data. A ring sends 2(p-1)/p of the gradients per rank.

In the library: minipar.DDP, which adds buckets by dtype, unused and frozen parameters, no_sync, recovery after exceptions.
Source: PyTorch DDP, arXiv:2006.15704, section 3.2.
"""

import torch
from torch import nn


def average_gradients(module, comm):
    """Average after the backward, with one all-reduce per parameter: correct, but nothing overlaps."""
    for param in module.parameters():
        param.grad = comm.all_reduce(param.grad, "mean")


class DDP(nn.Module):
    """Wrap `module` so that `backward()` gives averaged gradients. All ranks start with rank 0's parameters and buffers."""

    def __init__(self, module, comm, bucket_mb=25.0):
        super().__init__()
        self.module, self.comm = module, comm
        if len({param.dtype for param in module.parameters()}) > 1:
            raise ValueError("parameters of several dtypes: minipar.DDP makes buckets for each")
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data.copy_(comm.broadcast(tensor.data))
        self.buckets = [[]]
        for param in reversed(list(module.parameters())):  # parameters() yields a tied weight once
            if not param.requires_grad:
                raise ValueError(
                    "a frozen parameter: this DDP trains all of them; minipar.DDP does not have to"
                )
            if self.buckets[-1] and sum(p.nbytes for p in [*self.buckets[-1], param]) > bucket_mb * 2**20:
                self.buckets.append([])
            self.buckets[-1].append(param)
        self.bucket_of = {param: i for i, bucket in enumerate(self.buckets) for param in bucket}
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *args, **kwargs):
        self.missing, self.handles = [set(bucket) for bucket in self.buckets], []
        return self.module(*args, **kwargs)

    def _gradient_is_ready(self, param):  # a hook: autograd calls it during the backward
        if len(self.missing[self.bucket_of[param]]) == 0:
            raise ValueError("a gradient came twice: use minipar.DDP and its no_sync() to accumulate")
        if all(len(m) == len(b) for m, b in zip(self.missing, self.buckets)):  # first of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.missing[self.bucket_of[param]].discard(param)
        # len(self.handles) buckets have been started. Start the next ones, in order, as far as they are complete.
        while len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]:
            flat = torch.cat([p.grad.flatten() for p in self.buckets[len(self.handles)]])
            self.handles.append(self.comm.all_reduce(flat, "mean", async_op=True))

    def _finish(self):  # autograd calls it when the backward ends
        if len(self.handles) < len(self.buckets):
            raise ValueError("a parameter got no gradient: use minipar.DDP, which knows of unused parameters")
        for bucket, handle in zip(self.buckets, self.handles):
            averaged = handle.wait().split([p.numel() for p in bucket])
            for param, grad in zip(bucket, averaged):
                param.grad = grad.view_as(param)
