"""The dissemination barrier: in step s = 0, 1, ... rank r signals rank r + 2^s (mod p)."""

from __future__ import annotations

import torch

from minipar.comm.point_to_point import PointToPoint


def dissemination_barrier(comm: PointToPoint) -> None:
    """Return once every rank has called this. Sends one byte in each of ceil(log2 p) steps."""
    token = torch.zeros(1, dtype=torch.uint8, device=comm.device)
    distance = 1
    while distance < comm.size:
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.exchange(token, to, token.shape, token.dtype, source)
        distance *= 2
    if comm.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
