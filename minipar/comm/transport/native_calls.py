"""torch's own collectives on a process group. `comm/native.py` converts a Comm's arguments for them.

`op` is torch.distributed's name for the reduction, ranks are world ranks, and tensors are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed them, and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_(x: torch.Tensor, op: str, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, _operator(op), group)


def reduce_(x: torch.Tensor, root: int, op: str, group: dist.ProcessGroup) -> None:
    """Write the reduction into x on the root; on other ranks x is undefined afterwards."""
    dist.reduce(x, root, _operator(op), group)


def broadcast_(x: torch.Tensor, root: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(x, root, group)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, op: str, group: dist.ProcessGroup) -> None:
    """Write this rank's chunk of the reduction into `out`; all chunks have the same length."""
    reduce_scatter_single(out, x, _operator(op), group)


def all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate all ranks' x in `out`; all have the same length."""
    all_gather_single(out, x, group)


def all_to_all(
    out: torch.Tensor,
    x: torch.Tensor,
    recv_sizes: list[int],
    send_sizes: list[int],
    group: dist.ProcessGroup,
) -> None:
    dist.all_to_all_single(out, x, recv_sizes, send_sizes, group)


def _operator(op: str) -> Any:
    return getattr(dist.ReduceOp, op)
