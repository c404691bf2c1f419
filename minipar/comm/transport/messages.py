"""Messages between ranks, and the channels they belong to."""

from __future__ import annotations

import select
import socket
from typing import Any, NamedTuple

import torch

from minipar.comm.transport.stream import Stream

# One half of an exchange: the tensor to send or to receive into, and the peer's rank in the channel.
Half = tuple[torch.Tensor, int]
# What was posted to or from one peer so far: the number of messages, and the bytes and the label of the last.
Posts = tuple[int, int, str]


class ChannelId(NamedTuple):
    """Identity of a channel: its name, and its members as world ranks."""

    name: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        # Not all ranks: there may be thousands, and every message looks its channel up.
        return hash((self.name, len(self.ranks), self.ranks[:2]))

    def __str__(self) -> str:
        return f"comm {self.name!r}"


class Message(NamedTuple):
    """One message between two ranks, as seen by its sender or its receiver."""

    verb: str  # "send" or "receive"
    peer: int  # world rank
    channel: ChannelId
    lane: str  # "p2p" or "collective"
    number: int  # counted per peer, channel, lane and direction
    num_bytes: int
    label: str = ""  # "float32"; in a collective "all_reduce sum float32"
    needs_peer: bool = False  # nothing of it has arrived, and nothing will unless the peer, too, waits for it

    def __str__(self) -> str:
        preposition = "to" if self.verb == "send" else "from"
        what = f"{self.verb} {counted(self.num_bytes, 'byte')} {preposition} rank {self.peer}"
        of = f"{self.label}, " if self.label else ""
        return f"{what} on {self.channel} ({of}message {self.number})"


class OnLink(NamedTuple):
    """A wait for a message on a link of shared memory: the peer writes to the socket when its next part is there."""

    message: Message
    socket: socket.socket

    def __str__(self) -> str:
        return str(self.message)

    def as_message(self) -> Message:
        """Return the message, with `needs_peer` as it is now."""
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLIN)
            there = poll.poll(0)
        except (OSError, ValueError):  # it has just been closed
            return self.message
        return self.message._replace(needs_peer=not there)


def counted(n: int, what: str) -> str:
    """Return, for example, "1 byte" or "12 bytes"."""
    return f"{n} {what}{'' if n == 1 else 's'}"


class Channel:
    """The state shared by all Comms with the same ranks and name: a stream, message counters, scratch memory.

    Messages of collectives are counted apart from the caller's own ("p2p"): these are two lanes.

    key             its name and members
    peers           the members as ranks of the transport's process group
    digest          CRC-32 of the run's number, the name and the ranks, from which every tag of this channel is computed
    kind            the running collective, or None; `signature` is its kind and reduction, `shape` its tensor's shape
    sent, received  (peer, lane) -> what was posted
    """

    def __init__(
        self,
        key: ChannelId,
        peers: tuple[int, ...],
        digest: int,
        stream: Stream,
        device: torch.device,
    ):
        self.key, self.peers, self.digest = key, peers, digest
        self.stream = stream
        self.kind: str | None = None
        self.signature = ""
        self.shape: torch.Size | None = None
        self.kept: Any = None  # see `PointToPoint.kept`
        self.num_collectives = 0  # number of collectives that have begun
        self.sent: dict[tuple[int, str], Posts] = {}
        self.received: dict[tuple[int, str], Posts] = {}
        self._device = device
        self._labels: dict[tuple[str, torch.dtype], tuple[str, bytes]] = {}
        self._memory: dict[str, torch.Tensor] = {}  # use -> memory, as bytes
        self._views: dict[str, torch.Tensor] = {}  # use -> the part of that memory last returned

    def label(self, dtype: torch.dtype) -> tuple[str, bytes]:
        """Return the label of the running operation's messages, as text and as bytes (for their tags)."""
        key = (self.signature, dtype)
        if key not in self._labels:
            name = f"{self.signature} {str(dtype).removeprefix('torch.')}".strip()
            self._labels[key] = (name, name.encode())
        return self._labels[key]

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str) -> torch.Tensor:
        """Return memory that is kept between collectives, because touching new pages costs as much as copying into them."""
        view = self._views.get(use)
        if view is not None and view.numel() == num_elems and view.dtype == dtype:
            return view
        num_bytes = num_elems * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._memory[use] = memory
        self._views[use] = memory[:num_bytes].view(dtype)
        return self._views[use]
