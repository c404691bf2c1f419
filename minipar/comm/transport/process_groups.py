"""torch's process groups: their backends, their timeouts, and new groups by name."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from minipar.support.environment import gloo_interfaces

GLOO = "shared_gloo"  # gloo, of whose devices all groups of a process share one

_Gloo: Any = dist.ProcessGroupGloo  # torch's type stubs cover only a part of it


def _on_shared_device(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group on gloo as torch makes it, but for the device.

    torch gives each group a device of its own, and each device has a thread that looks at its sockets a hundred times a
    second. A process that has been in many meshes has a group for each of their axes: 8 ranks with 35 groups each spend a
    quarter of a core on waking.
    """
    options = _Gloo._Options()
    options._timeout = timeout
    options._threads = 2  # as torch has
    options._devices = _devices()
    return _Gloo(store, rank, size, options)


@cache
def _devices() -> list[Any]:
    """Return this process's gloo devices: one for each interface that gloo is told to use, else one that torch chooses."""
    return [_Gloo.create_device(interface=name) for name in gloo_interfaces()] or [
        _Gloo.create_default_device()
    ]


dist.Backend.register_backend(GLOO, _on_shared_device, devices=["cpu"])


def has_backend(group: dist.ProcessGroup, name: str) -> bool:
    """Return whether a process group has this backend, for any device: "cpu:gloo,cuda:nccl" has two."""
    return name in dist.get_backend(group)


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout_s: float, device: torch.device) -> None:
    """Set how long an operation on these process groups may take; torch's collectives have no timeout argument.

    On a GPU it is twice `timeout_s`: NCCL's own watchdog ends the process, but the Watch can explain the failure, so it
    must come first.
    """
    limit = timedelta(seconds=timeout_s if device.type == "cpu" else 2 * timeout_s)
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(limit, group)


def named_group(
    ranks: list[int],
    name: str,
    timeout_s: float,
    device: torch.device | None = None,
    like: dist.ProcessGroup | None = None,
) -> dist.ProcessGroup:
    """Create a process group whose members find each other by its name.

    dist.new_group instead matches members by the number of groups that each process has created so far. It hangs if these
    numbers differ, as in a pool that serves worlds of several sizes.
    The new group has the backend of `like`, by default that of torch's default group.
    On a GPU NCCL connects the members here, and not by ncclCommSplit, which all ranks of the world would have to call.
    """
    c10d: Any = dist.distributed_c10d
    on_gpu = device is not None and device.type == "cuda"
    backend = "nccl" if on_gpu else dist.get_backend(like)
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            GLOO if backend == "gloo" else backend,
            c10d._get_default_store(),
            group_name=f"{name} {ranks}",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
    finally:
        world.bound_device_id = bound
    group: dist.ProcessGroup = made
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
