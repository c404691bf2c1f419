"""Gather arbitrary Python values from all ranks, pickled as bytes."""

from __future__ import annotations

import pickle

import torch

from minipar.comm.host import on_host


def all_gather_objects(comm, value) -> list:
    """Return every rank's value, in rank order, on every rank.

    Over all ranks, each pickle and its length of 8 bytes are sent p-1 times.
    """
    comm = on_host(comm)
    data = _as_bytes(comm, value)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device)).tolist()
    return [_from_bytes(part) for part in comm.all_gather(data, sizes).split(sizes)]


def gather_objects(comm, value, root: int = 0) -> list | None:
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


def _as_bytes(comm, value) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(comm.device)


def _from_bytes(data: torch.Tensor):
    return pickle.loads(data.cpu().numpy().tobytes())
