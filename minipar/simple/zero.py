"""ZeRO-1 and ZeRO-2: data parallelism in which each of p ranks keeps the optimizer state of a p-th part of every parameter.

    gradient   [ 0 | 1 | 2 | 3 ]  --reduce-scatter, mean-->  shard r of the gradient      sends (p-1)/p P elements
                                                                    | optimizer step, with shard r of the state
    parameter  [ 0 | 1 | 2 | 3 ]  <-----all-gather---------  shard r of the parameter     sends (p-1)/p P elements

P is the number of parameters. The two steps together send what a ring all-reduce of each gradient sends, and the sums are
the same bit for bit.

Bytes per parameter with Adam in mixed precision (weight 2; gradient 2; state 12: float32 weight and two moments): DDP 16,
ZeRO-1 4 + 12/p, ZeRO-2 2 + 14/p. ZeRO-2 reduces each gradient to this rank's shard as soon as it is computed.
The code here is without mixed precision.

In the library: minipar.ZeroOptimizer, which adds buckets reduced during the backward, parameter groups, float32 master
weights, offload, unused parameters, and state that can be loaded on another number of ranks.
Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
"""

import torch
import torch.nn.functional as F


def padded(comm, x):
    """Flatten x, and append zeros until comm.size divides its length."""
    return F.pad(x.flatten(), (0, -x.numel() % comm.size))


def shard_of(comm, x):
    return padded(comm, x).chunk(comm.size)[comm.rank]


def reduced_shard(comm, grad):
    """Return this rank's shard of the mean of the gradient over ranks."""
    return comm.reduce_scatter(padded(comm, grad), "mean")


class Zero1:
    """Run `optimizer_cls` on this rank's shard of each parameter. It must be an elementwise optimizer, such as Adam."""

    def __init__(self, params, optimizer_cls, comm, **options):
        self.comm, self.params = comm, list(params)
        if any(not p.requires_grad for p in self.params):
            raise ValueError("a frozen parameter: leave it out, or use minipar.ZeroOptimizer")
        for p in self.params:
            p.data.copy_(comm.broadcast(p.data))
        self.shards = [shard_of(comm, p.data).clone() for p in self.params]
        self.optimizer = optimizer_cls(self.shards, **options)

    def gradient_shard(self, p):
        if p.grad is None:
            raise ValueError("a parameter got no gradient: minipar.ZeroOptimizer knows of unused ones")
        return reduced_shard(self.comm, p.grad)

    @torch.no_grad()
    def step(self):
        for p, shard in zip(self.params, self.shards):
            shard.grad = self.gradient_shard(p)
        self.optimizer.step()
        for p, shard in zip(self.params, self.shards):
            whole = self.comm.all_gather(shard)
            p.copy_(whole[: p.numel()].view_as(p))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Zero2(Zero1):
    """Reduce each gradient in a hook, during the backward, and keep this rank's shard. Several backwards accumulate.

    The hooks communicate, so all ranks must compute their gradients in the same order; ranks with the same model do.
    """

    def __init__(self, params, optimizer_cls, comm, **options):
        super().__init__(params, optimizer_cls, comm, **options)
        self.gradients = {}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.reduce_now)

    def reduce_now(self, p):
        shard = reduced_shard(self.comm, p.grad)
        p.grad = None
        self.gradients[p] = shard if p not in self.gradients else self.gradients[p] + shard

    def gradient_shard(self, p):
        return self.gradients.get(p)  # None if no rank computed it: the optimizer skips it

    def zero_grad(self):
        self.gradients.clear()
