"""Errors of a message."""

from __future__ import annotations

import torch


class PeerLost(RuntimeError):
    """The peer of a message has ended; the peer's own error says why."""


class PeerLate(TimeoutError):
    """A wait for a message to or from `peer`, a world rank, has passed its deadline."""

    def __init__(self, sentence: str, peer: int):
        super().__init__(sentence)
        self.peer = peer


class OutOfOrder(RuntimeError):
    """A rank makes groups or posts messages in a different order from its peer; NCCL would hang or mix up messages."""


def require_device(x: torch.Tensor, device: torch.device, comm: object) -> None:
    """Raise ValueError unless x is on its Comm's device: gloo takes CPU tensors; NCCL takes those on the rank's GPU."""
    if x.device != device:
        raise ValueError(
            f"x is on {x.device}, and {comm} on {device}; use x.to({str(device)!r}) or x.to(comm.device)"
        )
