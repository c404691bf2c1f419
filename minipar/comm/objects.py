"""Gather and broadcast arbitrary Python values, pickled as bytes."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from minipar.comm.communicator import Comm
from minipar.comm.host import on_host


def all_gather_objects(comm: Comm, value: object) -> list[Any]:
    """Return every rank's value, in rank order, on every rank.

    Each pickle and its length (8 bytes) are sent p-1 times, counting all ranks.
    """
    comm = on_host(comm)
    data = _as_bytes(comm, value)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device)).tolist()
    return [_from_bytes(part) for part in comm.all_gather(data, sizes).split(sizes)]


def gather_objects(comm: Comm, value: object, root: int = 0) -> list[Any] | None:
    """Return every rank's value, in rank order, on the root; None elsewhere.

    After an all-gather of the lengths, every rank but the root sends its pickle once.
    """
    comm = on_host(comm)
    data = _as_bytes(comm, value)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device)).tolist()
    if comm.rank != root:
        comm.send(data, root)
        return None
    parts = [data if r == root else comm.recv((n,), torch.uint8, r) for r, n in enumerate(sizes)]
    return [_from_bytes(part) for part in parts]


def broadcast_object(comm: Comm, value: object, root: int = 0) -> Any:
    """Return the root's value on every rank. Its length (8 bytes) is broadcast, and then its pickle."""
    comm = on_host(comm)
    data = _as_bytes(comm, value if comm.rank == root else None)
    size = int(comm.broadcast(torch.tensor([len(data)], device=comm.device), root=root).item())
    if comm.rank != root:
        data = data.new_empty(size)
    return _from_bytes(comm.broadcast(data, root=root))


def _as_bytes(comm: Comm, value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(comm.device)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
