"""Messages between ranks, the channels they belong to, and the count of bytes sent."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

import torch


class PeerLost(RuntimeError):
    """The peer of a message is gone; that rank has the reason."""


class PeerLate(TimeoutError):
    """A wait for a message of rank `peer`, a world rank, has passed its deadline."""

    def __init__(self, sentence: str, peer: int):
        super().__init__(sentence)
        self.peer = peer


class OutOfOrder(RuntimeError):
    """A rank makes groups, or posts messages, in another order than its peer: NCCL would hang, or cross the messages."""


def require_device(x: torch.Tensor, device: torch.device, comm) -> None:
    """Raise ValueError unless x is on the device of its Comm: gloo takes what is on the CPU, NCCL what is on its GPU."""
    if x.device != device:
        raise ValueError(
            f"x is on {x.device}, and {comm} on {device}; use x.to({str(device)!r}) or x.to(comm.device)"
        )


class Traffic:
    """Bytes and messages that this rank has sent through one Comm and all its subgroups.

    sent_bytes   payload bytes (received bytes are counted by the rank that sent them)
    messages     number of sends; an empty tensor is not sent
    by_kind      bytes by the operation that sent them: "all_reduce", "send", "exchange", ..., "native"

    Counted when a message is posted, never computed from a formula, so that a test can compare the count with a formula.
    """

    def __init__(self, parent: Traffic | None = None):
        self._parent = parent
        self._lock = threading.Lock()  # the streams of several subgroups update the same parent
        self.reset()

    def reset(self) -> None:
        self.sent_bytes, self.messages = 0, 0
        self.by_kind: Counter[str] = Counter()

    def book(self, kind: str, num_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += num_bytes
            self.messages += 1
            self.by_kind[kind] += num_bytes
        if self._parent is not None:
            self._parent.book(kind, num_bytes)

    def __repr__(self):
        kinds = ", ".join(f"{kind} {num_bytes}" for kind, num_bytes in self.by_kind.items())
        return f"Traffic({self.sent_bytes} bytes in {self.messages} messages: {kinds or 'nothing sent'})"


class Message(NamedTuple):
    """One message between two ranks, from the side of its sender or its receiver."""

    verb: str  # "send" or "receive"
    peer: int  # world rank
    channel: object  # printed as "comm 'world'"
    lane: str  # "p2p" or "collective"
    number: int  # counted per peer, channel, lane and direction
    num_bytes: int
    label: str = ""  # "float32"; in a collective "all_reduce sum float32"

    def __str__(self):
        preposition = "to" if self.verb == "send" else "from"
        what = f"{self.verb} {self.num_bytes} bytes {preposition} rank {self.peer}"
        of = f"{self.label}, " if self.label else ""
        return f"{what} on {self.channel} ({of}message {self.number})"


class MessageCounts(NamedTuple):
    """A rank's pending waits, and (channel, lane, peer) -> (messages posted, bytes of the last, label of the last)."""

    waiting: list[object]
    sent: dict[tuple, tuple[int, int, str]]
    received: dict[tuple, tuple[int, int, str]]


class ChannelId(NamedTuple):
    """Identity of a channel: its name, and its members as world ranks."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self):
        return f"comm {self.name!r}"


class Channel:
    """The state shared by all Comms with the same ranks and name: a stream, message counters, scratch memory.

    peers   the members as ranks of the transport's process group
    digest  CRC-32 of the run's number, the name and the ranks, from which every tag of this channel is computed
    """

    def __init__(self, key: ChannelId, peers: tuple[int, ...], digest: int, stream, device: torch.device):
        self.key, self.peers, self.digest, self.stream = key, peers, digest, stream
        self.kind: str | None = None  # the running collective; signature adds its reduction
        self.signature = ""
        self.shape: torch.Size | None = None  # of the running collective's tensor
        self.num_collectives = 0  # those that have begun
        self.sent: dict[tuple[int, str], tuple[int, int, str]] = {}  # (peer, lane) -> count, bytes, label
        self.received: dict[tuple[int, str], tuple[int, int, str]] = {}
        self._device = device
        self._labels: dict[tuple, tuple[str, bytes]] = {}
        self._scratch: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # use -> memory, the part last used

    def label(self, dtype: torch.dtype) -> tuple[str, bytes]:
        """Return the label of the running operation's messages, also as bytes for their tags."""
        key = (self.signature, dtype)
        if key not in self._labels:
            name = f"{self.signature} {str(dtype).removeprefix('torch.')}".strip()
            self._labels[key] = (name, name.encode())
        return self._labels[key]

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str) -> torch.Tensor:
        """Return memory kept between collectives: the first touch of new pages costs as much as the copy into them."""
        memory, view = self._scratch.get(use, (None, None))
        if view is not None and view.numel() == num_elems and view.dtype == dtype:
            return view
        num_bytes = num_elems * dtype.itemsize
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        view = memory[:num_bytes].view(dtype)
        self._scratch[use] = (memory, view)
        return view
