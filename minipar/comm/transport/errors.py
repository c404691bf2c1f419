"""Errors of a message."""

from __future__ import annotations

import re

import torch


class PeerLost(RuntimeError):
    """The peer of a message has ended; the peer's own error says why."""


def connection_broke(error: BaseException) -> bool:
    """Return whether an error of a socket, or of gloo, says that the other end has closed the connection."""
    pattern = "connection (closed|reset|refused)|broken pipe|process has ended"
    return re.search(pattern, str(error), re.IGNORECASE) is not None


def peer_lost(what: str, peer: str, error: Exception) -> PeerLost:
    """Return the error of a rank that could not do `what`; a broken connection is told as what it means of `peer`."""
    ended = (
        f"{peer} has ended, or has closed its connections; if it failed, its own error says why, else it made fewer calls: "
        "give all ranks equally many batches and steps"
    )
    return PeerLost(f"{what}: {ended if connection_broke(error) else error}")


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
