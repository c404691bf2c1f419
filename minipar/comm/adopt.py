"""A world on a process group that somebody else initialised."""

from __future__ import annotations

import atexit
from collections import Counter

import torch
import torch.distributed as dist

from minipar.comm.grouped import Grouped
from minipar.comm.transport import Tagged, Transport

# How many worlds this process has made on each process group: part of their tags, so that their messages never meet.
_worlds_made: Counter[str] = Counter()


def adopt(group, timeout_s: float, node_size: int | None = None) -> Transport:
    """The transport of a new world on `group` (None: the default group). All its ranks make their worlds in one order."""
    group = dist.group.WORLD if group is None else group
    nccl = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    ranks = tuple(dist.get_process_group_ranks(group))
    number = _worlds_made[group.group_name] = _worlds_made[group.group_name] + 1
    make, namespace = Grouped if nccl else Tagged, f"world {number} of {group.group_name}/"
    transport = make(
        group, ranks, dist.get_rank(), device, timeout_s, run=number, node_size=node_size, namespace=namespace
    )
    atexit.register(transport.release_groups)
    return transport
