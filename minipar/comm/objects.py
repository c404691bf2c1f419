"""Any Python values between ranks: pickled, as bytes."""

from __future__ import annotations

import pickle

import torch


def all_gather_objects(comm, value) -> list:
    """Every rank's value, in rank order, on every rank. Sends (p-1) times its pickle, and 8 bytes for its length."""
    data = _as_bytes(comm, value)
    sizes = comm.all_gather(torch.tensor([len(data)], device=comm.device)).tolist()
    return [_from_bytes(part) for part in comm.all_gather(data, sizes).split(sizes)]


def gather_objects(comm, value, root: int = 0) -> list | None:
    """Every rank's value, in rank order, on the root; None elsewhere. Each other rank sends its pickle once."""
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
