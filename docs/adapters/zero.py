"""torch's ZeroRedundancyOptimizer. It shards the state alone: that parameters begin alike, and gradients are averaged, is
left to DDP; here two loops do it."""

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


class Zero1(ZeroRedundancyOptimizer):
    def __init__(self, params, optimizer_cls, comm, **options):
        self.averaged = list(params)
        for p in self.averaged:
            dist.broadcast(p.data, group_src=0, group=comm.process_group())
        super().__init__(self.averaged, optimizer_cls, process_group=comm.process_group(), **options)

    def step(self):
        for p in self.averaged:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=self.process_group)
                p.grad /= self.world_size
        super().step()
