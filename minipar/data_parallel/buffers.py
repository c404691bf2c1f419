"""Buffers, running means say, are no parameters and have no gradients: every rank's forward changes its own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_buffers_of_rank0(module: nn.Module, comms_of: Sequence[Callable[[Tensor], object]]) -> None:
    """Make the module's buffers those of rank 0, over one Comm after the other; a Comm may be None.

    Sends, per Comm and dtype, one broadcast of all its buffers: the B bytes of them p-1 times, all ranks together.
    A buffer that does not change is not written to, so that autograd may have saved it.
    """
    for comm_of in comms_of:
        groups: dict[tuple, list[Tensor]] = {}
        for buffer in module.buffers():
            comm = comm_of(buffer)
            if comm is not None and comm.size > 1 and buffer.numel():
                groups.setdefault((comm, buffer.dtype, buffer.device), []).append(buffer)
        for (comm, *_), buffers in groups.items():
            flat = comm.broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]))
            for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
                if not torch.equal(buffer, value := value.view(buffer.shape)):
                    buffer.copy_(value)
