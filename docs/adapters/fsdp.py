"""torch's fully_shard (FSDP2). It takes parameters as they are, so that they are broadcast first."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def FSDP(module, comm, unit_class):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, group_src=0, group=comm.process_group())
    mesh = DeviceMesh.from_group(comm.process_group(), comm.device.type)
    for unit in [m for m in module.modules() if isinstance(m, unit_class)]:
        fully_shard(unit, mesh=mesh)
    return fully_shard(module, mesh=mesh)
