"""The dissemination barrier: in step s everybody tells the rank 2^s further on that it has come this far."""

from __future__ import annotations

import torch


def disseminate(comm) -> None:
    """Return when every rank has called this: ceil(log2 p) steps of one byte."""
    token, distance = torch.zeros(1, dtype=torch.uint8, device=comm.device), 1
    while distance < comm.size:
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.exchange(token, to, token.shape, token.dtype, source)
        distance *= 2
    if comm.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
