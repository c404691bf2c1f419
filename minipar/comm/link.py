"""One process's end of the world: the transport under every Comm, its deadlines, and an account of what is under way."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from minipar.comm.stream import CudaStream, ThreadStream
from minipar.trace import Trace


class PeerLost(RuntimeError):
    """The other end of a message is gone; the reason is on that rank."""


class Message(NamedTuple):
    """One message between two ranks, as its sender or its receiver sees it."""

    verb: str  # "send" or "receive"
    peer: int  # world rank
    channel: str
    lane: str  # "p2p" or "collective"
    number: int  # counted per peer, channel, lane and direction
    num_bytes: int

    def __str__(self):
        preposition = "to" if self.verb == "send" else "from"
        what = f"{self.verb} {self.num_bytes} bytes {preposition} rank {self.peer}"
        return f"{what} on {self.channel} (message {self.number})"


@dataclass
class Link:
    """What all Comms of one process share. `group` is a torch process group, `ranks` its members as world ranks."""

    group: Any
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_s: float
    run: int = 0
    node_size: int | None = None  # ranks on one machine, where the launcher knows it
    trace: Trace | None = None
    report: Callable[[Any], None] | None = None  # hands a value to whoever called `run`
    groups: dict[tuple, Any] = field(
        default_factory=dict
    )  # (name, ranks) -> process group, where one was needed
    channels: dict[int, Channel] = field(default_factory=dict)
    waiting: dict[int, Message] = field(default_factory=dict)  # thread -> the message it waits for

    def __post_init__(self):
        self.timeout = timedelta(seconds=self.timeout_s)

    def let_go(self) -> None:
        """Drop the process groups: torch ends a group's threads with the last reference to it.

        At exit they must have ended before the interpreter has, or one that still lets go of a tensor aborts the process.
        """
        self.group = None
        self.groups.clear()

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        digest = zlib.crc32(repr((self.run, name, ranks)).encode())
        if digest not in self.channels:
            self.channels[digest] = Channel(name, digest, self.device)
        return self.channels[digest]

    def wait(self, work, message: Message) -> None:
        """Wait for a posted send or receive, until the deadline."""
        thread = threading.get_ident()
        self.waiting[thread] = message
        start_s = time.monotonic()
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            if time.monotonic() - start_s >= 0.9 * self.timeout_s:
                raise TimeoutError(f"rank {self.rank} waited {self.timeout_s:g} s to {message}") from None
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None
        finally:
            self.waiting.pop(thread, None)

    def account(self) -> Account:
        """What this rank has sent, received and waits for: enough to explain a failure from all ranks' accounts."""
        account = Account(list(self.waiting.values()), {}, {})
        for channel in list(self.channels.values()):
            for table, posted in ((account.sent, channel.sent), (account.received, channel.received)):
                for (peer, lane), (number, num_bytes) in list(posted.items()):
                    table[channel.name, lane, peer] = (number, num_bytes)
        return account


class Account(NamedTuple):
    """(channel, lane, peer) -> how many messages were posted, and the bytes of the last."""

    waiting: list[Message]
    sent: dict[tuple[str, str, int], tuple[int, int]]
    received: dict[tuple[str, str, int], tuple[int, int]]


class Channel:
    """What all Comms with the same ranks and name share: a tag, a stream, message counters, scratch memory.

    gloo hands messages over by tag. The tag here is a digest of run, name, ranks, the message's number and its length:
    a message can only be received as what it was sent as. One of another length is never delivered (it would abort the
    process), and one left over from an earlier run is never found.
    """

    def __init__(self, name: str, digest: int, device: torch.device):
        self.name = f"comm {name!r}"
        self.digest = digest
        self.stream = CudaStream(self.name, device) if device.type == "cuda" else ThreadStream(self.name)
        self.kind: str | None = None  # the collective under way
        self.sent: dict[tuple[int, str], tuple[int, int]] = {}  # (peer, lane) -> messages, bytes of the last
        self.received: dict[tuple[int, str], tuple[int, int]] = {}
        self._device = device
        self._scratch: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # use -> memory, the part last used

    def tag(self, lane: str, number: int, num_bytes: int) -> int:
        return zlib.crc32(b"%s %d %d" % (lane.encode(), number, num_bytes), self.digest) >> 1  # 31 bits

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str) -> torch.Tensor:
        """Memory kept between collectives: the first touch of fresh pages costs as much as the copy into them."""
        memory, view = self._scratch.get(use, (None, None))
        if view is not None and view.numel() == num_elems and view.dtype == dtype:
            return view
        num_bytes = num_elems * dtype.itemsize
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        view = memory[:num_bytes].view(dtype)
        self._scratch[use] = (memory, view)
        return view


class Posted:
    """Messages handed to the transport: `wait()` returns what was received, when all have arrived or left."""

    def __init__(self, link: Link, works: Sequence[tuple], out: torch.Tensor | None):
        self._link = link
        self._works = works  # (work, message, tensor): the tensor must live until its message has left
        self._out = out

    def wait(self) -> torch.Tensor | None:
        for work, message, _ in self._works:
            self._link.wait(work, message)
        self._works = ()
        return self._out
