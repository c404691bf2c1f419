"""Whether this process is one of torchrun's ranks, a rank of a local pool, or neither. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os

MAX_RANKS = 64  # maximum number of ranks in a local pool
MULTI_RANK_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # read by NCCL 2.30 and later
_RANK = "minipar rank "


def under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_per_node() -> int:
    """Return the number of torchrun's ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def local_rank() -> int:
    """Return this rank's number among torchrun's ranks on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of torchrun's ranks, or none of them."""
    return os.environ.get("RANK", "0") == "0"


def shares_gpus() -> bool:
    """Return whether the user allows several ranks on one GPU."""
    return os.environ.get(MULTI_RANK_GPU, "0") not in ("", "0")


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that gloo is told to use; [] if it may choose."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def name_process(rank: int) -> None:
    """Name this process as a rank of a local pool; `logging` shows the name as `processName`."""
    multiprocessing.current_process().name = f"{_RANK}{rank}"


def in_local_pool() -> bool:
    """Return whether this process is a rank of a local pool. A child of a rank is not one."""
    return multiprocessing.current_process().name.startswith(_RANK)
