"""A transport on a process group that the caller has initialised."""

from __future__ import annotations

import atexit
from collections import Counter

import torch
import torch.distributed as dist

from minipar.comm.grouped import Grouped
from minipar.comm.transport import Tagged, Transport

# Number of worlds made on each process group in this process. It is part of every tag, so that two worlds on one group
# never receive each other's messages.
_num_worlds: Counter[str] = Counter()


def transport_on(group, timeout_s: float, node_size: int | None = None) -> Transport:
    """Make the transport of a new world on `group` (None: the default group). All ranks must do so in the same order."""
    group = dist.group.WORLD if group is None else group
    nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    ranks = tuple(dist.get_process_group_ranks(group))
    number = _num_worlds[group.group_name] = _num_worlds[group.group_name] + 1
    make, namespace = Grouped if nccl else Tagged, f"world {number} of {group.group_name}/"
    transport = make(
        group, ranks, dist.get_rank(), device, timeout_s, run=number, node_size=node_size, namespace=namespace
    )
    atexit.register(transport.release_groups)
    return transport
