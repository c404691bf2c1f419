"""Buffers, such as running means: each rank's forward changes its own copy, so rank 0's is copied to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minipar.comm import Comm


@torch.no_grad()
def copy_buffers_of_rank0(module: nn.Module, comms_of: Sequence[Callable[[Tensor], Comm | None]]) -> None:
    """Copy rank 0's buffers to the other ranks, over each buffer's Comms in turn; where a Comm is None, copy nothing.

    Sends one broadcast per Comm and dtype; all ranks together send the bytes of the buffers p-1 times. A buffer whose
    values do not change is not written to, since autograd may have saved it.
    """
    for comm_of in comms_of:
        groups: dict[tuple[Comm, torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in module.buffers():
            comm = comm_of(buffer)
            if comm is not None and comm.size > 1 and buffer.numel():
                groups.setdefault((comm, buffer.dtype, buffer.device), []).append(buffer)
        for (comm, *_), buffers in groups.items():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            comm.broadcast(flat, out=flat)
            for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
                value = value.view(buffer.shape)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
