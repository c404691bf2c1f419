"""The parameters that any rank used: only these get gradients, to which ranks that did not use them contribute zeros."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from minipar.staging import to_device


def used_on_any_rank(
    comm_of: Mapping[nn.Parameter, object], used_here: Iterable[nn.Parameter], algorithm: str
) -> set[nn.Parameter]:
    """Return, on every rank, the parameters used on any rank of their Comm.

    Sends, per Comm, an all-reduce of one byte per parameter, rounded up to a multiple of p: 2(p-1)/p of that by ring.
    """
    used_here, groups = set(used_here), {}
    for param, comm in comm_of.items():
        groups.setdefault(comm, []).append(param)
    used = set()
    for comm, params in groups.items():
        flags = torch.zeros(-(-len(params) // comm.size) * comm.size, dtype=torch.uint8)
        flags[: len(params)] = torch.tensor([p in used_here for p in params])
        flags = comm.all_reduce(to_device(flags, comm.device), "max", algorithm=algorithm)
        if used_here.issuperset(params):  # a GPU need not be waited for
            used.update(params)
        else:
            used |= {p for p, flag in zip(params, flags.tolist()) if flag}
    return used
