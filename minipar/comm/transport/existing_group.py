"""A transport on a process group that the caller has initialised."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minipar.comm.transport.transport import Transport
from minipar.comm.transport.transports import choose_transport
from minipar.comm.transport.watch import Stuck, Watch

# Number of worlds made on each process group in this process. It is part of every tag, so that two worlds on one group
# never receive each other's messages.
_num_worlds: Counter[str] = Counter()


def transport_on(group: Any, timeout_s: float, node_size: int | None = None) -> Transport:
    """Make the transport of a new world on `group` (None: the default). All ranks must make worlds in the same order."""
    group = dist.group.WORLD if group is None else group
    nccl = "nccl" in dist.get_backend(group)
    device = _bound_device(group) if nccl else torch.device("cpu")
    ranks = tuple(dist.get_process_group_ranks(group))
    _num_worlds[group.group_name] += 1
    number = _num_worlds[group.group_name]
    make = choose_transport(dist.get_backend(group))
    namespace = f"world {number} of {group.group_name}/"
    transport = make(
        group, ranks, dist.get_rank(), device, timeout_s, run=number, node_size=node_size, namespace=namespace
    )
    if device.type == "cuda":
        transport.watch = Watch(timeout_s, partial(_end_process, transport.rank))
        transport.watch.start(device)
    atexit.register(transport.release_groups)
    return transport


def _end_process(rank: int, stuck: Stuck) -> None:
    """End this process, since nothing else would end its wait for the GPU. torchrun then ends the other ranks."""
    print(f"rank {rank}: {stuck}: a member has not called it", file=sys.stderr, flush=True)
    os._exit(1)


def _bound_device(group: Any) -> torch.device:
    """Return the GPU that the group was made for (`device_id`), else the current GPU."""
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
