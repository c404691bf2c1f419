"""ZeRO-1 and ZeRO-2: data parallelism in which each of p ranks keeps the optimizer state of a p-th part of every parameter.

    reduce-scatter    my part of the gradient = 1/p * sum over ranks          sends (p-1)/p P elements, of P parameters
    update            my part of the parameter, with my part of the state
    all-gather        the whole parameter, from every rank's updated part     sends (p-1)/p P elements

Together they send what a ring all-reduce of each gradient sends, and the sums are the same bit for bit.

Bytes per parameter with Adam in mixed precision (weight 2; gradient 2; state 12: float32 weight and two moments): DDP 16,
ZeRO-1 4 + 12/p, ZeRO-2 2 + 14/p. ZeRO-2 reduces each gradient to this rank's part as soon as it is computed.
The code here is without mixed precision.

In the library: minipar.ZeroOptimizer, which adds buckets reduced during the backward, parameter groups, float32 master
weights, offload, unused parameters, and state that can be loaded on another number of ranks.
Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
"""

import torch
import torch.nn.functional as F


class Zero1:
    """Run `optimizer_cls` on this rank's part of each parameter. It must be an elementwise optimizer, such as Adam."""

    def __init__(self, params, optimizer_cls, comm, **options):
        self.comm, self.params = comm, list(params)
        if any(not p.requires_grad for p in self.params):
            raise ValueError("a frozen parameter: leave it out, or use minipar.ZeroOptimizer")
        for p in self.params:
            p.data.copy_(comm.broadcast(p.data))
        self.parts = [self.mine(p.data).clone() for p in self.params]
        self.optimizer = optimizer_cls(self.parts, **options)

    def padded(self, x):
        """Flatten x, and append zeros until p divides its length."""
        return F.pad(x.flatten(), (0, -x.numel() % self.comm.size))

    def mine(self, x):
        return self.padded(x).chunk(self.comm.size)[self.comm.rank]

    def part_of_gradient(self, p):
        if p.grad is None:
            raise ValueError("a parameter got no gradient: minipar.ZeroOptimizer knows of unused ones")
        return self.comm.reduce_scatter(self.padded(p.grad), "mean")

    @torch.no_grad()
    def step(self):
        for p, part in zip(self.params, self.parts):
            part.grad = self.part_of_gradient(p)
        self.optimizer.step()
        for p, part in zip(self.params, self.parts):
            whole = self.comm.all_gather(part)
            p.copy_(whole[: p.numel()].view_as(p))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Zero2(Zero1):
    """Reduce each gradient in a hook, during the backward, and keep this rank's part. Several backwards accumulate.

    The hooks communicate, so all ranks must compute their gradients in the same order, as ranks with the same model do.
    """

    def __init__(self, params, optimizer_cls, comm, **options):
        super().__init__(params, optimizer_cls, comm, **options)
        self.gradients = {}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._cut)

    def _cut(self, p):
        part, p.grad = super().part_of_gradient(p), None
        self.gradients[p] = part if p not in self.gradients else self.gradients[p] + part

    def part_of_gradient(self, p):
        return self.gradients.get(p)  # None if no rank computed it: the optimizer skips it

    def zero_grad(self):
        self.gradients.clear()
