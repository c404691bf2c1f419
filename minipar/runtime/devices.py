"""The backend of a world's messages and the device of a rank: decided here, for local pools and for torchrun.

    NCCL   local rank r has GPU r; with more ranks than GPUs, where NCCL can do it, GPU r modulo their number
    gloo   every rank is on the CPU

A choice that cannot work is refused in the caller's process, before any rank waits for another.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from minipar.support.environment import MULTI_RANK_GPU, shares_gpus
from minipar.support.errors import one_of

BACKENDS = ("gloo", "nccl", "auto")
SHARING_NCCL = (2, 30)  # the first NCCL that can put several ranks of one communicator on one GPU


class Machine(NamedTuple):
    """The facts that decide backend and device: number of GPUs, NCCL's version or None, and if ranks may share a GPU."""

    num_gpus: int
    nccl: tuple[int, ...] | None
    shares_gpus: bool

    @classmethod
    def here(cls) -> Machine:
        return cls(torch.cuda.device_count(), _nccl_version(), shares_gpus())


def _nccl_version() -> tuple[int, ...] | None:
    """Return the version of the NCCL that this process has loaded, which may be newer than the one torch was built with."""
    try:
        built: tuple[int, ...] = torch.cuda.nccl.version()
    except AttributeError:  # torch was built without it
        return None
    loaded = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(loaded))
    except OSError:  # torch was built with NCCL inside
        return built[:3]
    return loaded.value // 10_000, loaded.value // 100 % 100, loaded.value % 100


def choose_backend(backend: str, local_size: int, machine: Machine) -> str:
    """Return "nccl" or "gloo"; for "auto", nccl if it can serve every local rank.

    Raises ValueError for an unknown name, or for "nccl" if NCCL cannot serve `local_size` ranks.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; use {one_of(BACKENDS)}")
    if backend == "auto":
        return "gloo" if why_not_nccl(local_size, machine) else "nccl"
    if backend == "nccl" and (why := why_not_nccl(local_size, machine)):
        raise ValueError(f"backend='nccl' {why}")
    return backend


def why_not_nccl(local_size: int, machine: Machine) -> str | None:
    """Return why NCCL cannot serve `local_size` ranks on this machine, and what would work; None if NCCL can."""
    gpus, version = machine.num_gpus, ".".join(map(str, machine.nccl or ()))
    if gpus == 0:
        return "needs a GPU, and torch finds none; use gloo"
    if machine.nccl is None:
        return "is not in this build of torch; install torch with CUDA, or use gloo"
    if local_size <= gpus:
        return None
    many = f"has {local_size} ranks for {gpus} {'GPU' if gpus == 1 else 'GPUs'} here"
    fewer = f"use {gpus} {'rank' if gpus == 1 else 'ranks'}"
    if machine.nccl < SHARING_NCCL:
        return f"{many}, and NCCL {version} allows one rank per GPU; {fewer}, NCCL 2.30 or later, or gloo"
    if not machine.shares_gpus:
        return f"{many}; {fewer}, set {MULTI_RANK_GPU}=1 so that ranks share a GPU, or use gloo"
    return None


def device_of(backend: str, local_rank: int, machine: Machine) -> torch.device:
    """Return the device of a rank's tensors, and make it the current one, which NCCL and torch.cuda act on."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % machine.num_gpus)
    torch.cuda.set_device(device)
    return device


def group_options(backend: str, device: torch.device) -> dict[str, Any]:
    """Return the options of `init_process_group`.

    With NCCL, gloo carries the values that the host reads (`comm/host.py`). With a device_id, NCCL connects all ranks here;
    at the first message, other ranks might be busy elsewhere. The device_id also keeps the other ranks off GPU 0.
    """
    if backend != "nccl":
        return {"backend": backend}
    return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
