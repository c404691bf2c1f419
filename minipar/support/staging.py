"""Copies from host memory to a GPU without making the host wait.

ordinary memory   the host waits until the GPU has finished all earlier work, and then waits for the copy
pinned memory     the copy is enqueued like a kernel; torch reuses the memory only after the copy
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return `x`; copy it to pinned memory if it is on the host and `device` is a GPU."""
    return x.pin_memory() if _crosses(x, device) else x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. The host waits only for copies from a GPU to the host."""
    return pinned(x, device).to(device, non_blocking=True) if _crosses(x, device) else x.to(device)


def _crosses(x: Tensor, device: torch.device) -> bool:
    return x.device.type == "cpu" and device.type != "cpu"
