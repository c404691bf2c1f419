"""torch's DistributedDataParallel; and a mean of gradients by hand, one all_reduce for each parameter."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def DDP(module, comm, bucket_mb=25.0):
    return DistributedDataParallel(module, process_group=comm.process_group(), bucket_cap_mb=bucket_mb)


def average_gradients(module, comm):
    for p in module.parameters():
        dist.all_reduce(p.grad, group=comm.process_group())
        p.grad /= comm.size
