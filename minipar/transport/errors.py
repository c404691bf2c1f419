"""Errors of a message."""

from __future__ import annotations

import torch


class PeerLost(RuntimeError):
    """The peer of a message has ended; the peer's own error says why."""


class PeerLate(TimeoutError):
    """A wait for a message of rank `peer`, a world rank, has passed its deadline."""

    def __init__(self, sentence: str, peer: int):
        super().__init__(sentence)
        self.peer = peer


class OutOfOrder(RuntimeError):
    """A rank makes groups or posts messages in a different order from its peer; NCCL would hang or mix up messages."""


def require_device(x: torch.Tensor, device: torch.device, comm: object) -> None:
    """Raise ValueError unless x is on the device of its Comm: gloo takes CPU tensors, NCCL tensors on the rank's GPU."""
    if x.device != device:
        raise ValueError(
            f"x is on {x.device}, and {comm} on {device}; use x.to({str(device)!r}) or x.to(comm.device)"
        )
