"""Values that must be equal on all ranks: compared by one digest, and told by name where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from minipar.comm.communicator import Comm
from minipar.comm.host import on_host
from minipar.comm.objects import all_gather_objects

DIGEST_BYTES = 16


def require_equal(comm: Comm, what: str, entries: Mapping[str, object], advice: str) -> None:
    """Raise ValueError, the same on every rank, unless all ranks have equal entries in the same order.

    what     the kind of entries, in the plural: "parameters"; the error of a rank that compares alone says it, too
    entries  name -> value, compared as text, so that shapes, dtypes and plans can be values
    advice   what to do about a difference; the end of the error's sentence

    Sends a digest of 16 bytes to each other rank and, only if digests differ, the entries.
    """
    said = {name: str(value) for name, value in entries.items()}
    digest = hashlib.blake2b(repr(list(said.items())).encode(), digest_size=DIGEST_BYTES).digest()
    on = on_host(comm)
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(on.device)
    with on.saying(f"the comparison of {what}"):
        digests = on.all_gather(own[None])
    if not (digests != own).any():
        return
    first, *others = all_gather_objects(comm, said)
    for rank, theirs in enumerate(others, 1):
        if list(theirs.items()) != list(first.items()):
            raise ValueError(f"the ranks' {what} differ: {_difference(first, theirs, rank)}; {advice}")


def _difference(first: dict[str, str], theirs: dict[str, str], rank: int) -> str:
    for name in (*first, *theirs):
        mine, other = first.get(name, "missing"), theirs.get(name, "missing")
        if mine != other:
            return f"{name} is {mine} on rank 0, and {other} on rank {rank}"
    name, other = next((a, b) for a, b in zip(first, theirs) if a != b)
    return f"in their order, rank 0 has {name} where rank {rank} has {other}"
