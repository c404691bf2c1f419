"""ZeRO-1 and ZeRO-2: of p ranks, each keeps and updates a p-th part of every parameter's optimizer state.

    reduce-scatter    my part of the gradient = 1/p * sum over ranks       (p-1)/p P elements sent
    update            my part of the parameter, with my part of the state
    all-gather        everybody's parts                                    (p-1)/p P elements sent

Together the 2P of an all-reduce, and bit by bit its result. In mixed precision with Adam a rank holds 4 + 12/p bytes per
parameter in stage 1; in stage 2, where a gradient is cut as soon as it is computed, 2 + 14/p.

The library's: minipar.ZeroOptimizer, plus buckets reduced during the backward, parameter groups, masters in float32,
offload, unused parameters, and state that moves to another number of ranks.
Source: ZeRO, arXiv:1910.02054, sections 5 and 7.
"""

import torch
import torch.nn.functional as F


class Zero1:
    """`optimizer_cls` over my part of each parameter. Any optimizer will do that updates element by element."""

    def __init__(self, params, optimizer_cls, comm, **options):
        self.comm, self.params = comm, list(params)
        if any(not p.requires_grad for p in self.params):
            raise ValueError("a frozen parameter: leave it out, or use minipar.ZeroOptimizer")
        for p in self.params:
            p.data.copy_(comm.broadcast(p.data))
        self.parts = [self.mine(p.data).clone() for p in self.params]
        self.optimizer = optimizer_cls(self.parts, **options)

    def padded(self, x):
        """Flat, with zeros at the end until p divides its length."""
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
    """The same, but a gradient is reduced when it is computed, and only my part of it stays. Backwards add up.

    All ranks must compute their gradients in one order, as one model does.
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
        return self.gradients.get(p)  # None: no rank used it, and the optimizer leaves it alone

    def zero_grad(self):
        self.gradients.clear()
