"""Copies from the host's memory to a GPU for which the host does not wait.

ordinary memory   the host waits until the GPU has done all that was enqueued before, and then the copy
pinned memory     the copy is enqueued as a kernel is; torch gives the memory to another tensor only after it
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return `x`, in pinned memory where it is on the host and `device` is a GPU."""
    return x.pin_memory() if _crosses(x, device) else x


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. Only what is copied from a GPU to the host is waited for."""
    return pinned(x, device).to(device, non_blocking=True) if _crosses(x, device) else x.to(device)


def _crosses(x: Tensor, device: torch.device) -> bool:
    return x.device.type == "cpu" and device.type != "cpu"
