"""Parameters that no rank used get no gradient; if only some ranks used a parameter, the other ranks contribute zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from minipar.comm import Comm
from minipar.support.staging import to_device


def used_on_any_rank(
    comm_of: Mapping[nn.Parameter, Comm], used_here: Iterable[nn.Parameter], algorithm: str
) -> set[nn.Parameter]:
    """Return, on every rank, the parameters used on any rank of their Comm.

    All-reduces one byte per parameter over each Comm, rounded up to a multiple of p; a ring sends 2(p-1)/p of that.
    """
    used_here = set(used_here)
    groups: dict[Comm, list[nn.Parameter]] = {}
    for param, comm in comm_of.items():
        groups.setdefault(comm, []).append(param)
    used: set[nn.Parameter] = set()
    for comm, params in groups.items():
        flags = torch.zeros(-(-len(params) // comm.size) * comm.size, dtype=torch.uint8)
        flags[: len(params)] = torch.tensor([p in used_here for p in params])
        flags = comm.all_reduce(to_device(flags, comm.device), "max", algorithm=algorithm)
        if used_here.issuperset(params):  # if this rank used all parameters, it need not wait for the GPU
            used.update(params)
        else:
            used |= {p for p, flag in zip(params, flags.tolist()) if flag}
    return used
