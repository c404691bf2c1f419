"""The shared-memory transport, for gloo ranks on one machine: messages of collectives go through memory of two ranks.

gloo copies a message into the kernel and out of it again, and a thread of its own receives it and wakes the waiting one.
Here the sender copies the message into slots of memory that both ranks have mapped, and the receiver reads one slot while
the sender fills the other. A short message is worth it only if others follow, so the first ones of a channel stay on gloo.
So do the messages of pipelines, and the short ones of all-to-all, many of which are under way at once.

A link is one direction between two ranks on one channel (`linking.py`), with small slots for short messages or large ones
for long messages. It consists of a memory file without a name, and a connection on which the sender writes a header per
segment and the receiver a byte for each slot that is free again. Nothing has a name that could outlive the ranks, and a
rank's connections close when it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minipar.transport.errors import PeerLate, PeerLost
from minipar.transport.linking import Described, agree
from minipar.transport.messages import Channel, ChannelId, Half, Message
from minipar.transport.transport import Posted, Tagged

SLOT_BYTES = 1 << 20  # of links for long messages
NUM_SLOTS = 2
LONG_BYTES = 256 << 10  # messages of at least this size are long; others fit into one small slot of this size
REPEATED = 32  # a short message uses a link if this many messages of its channel went before it, between the same ranks
# A link moves data only while its rank waits for it. So an exchange may use links if its collective waits for exchanges in
# the order of posting. A send without a receive may do so only in a broadcast or a reduce: ranks wait along a tree there,
# and never for each other.
EXCHANGES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "ring_attention",
    "ring_attention_gradients",
)
ROOTED = ("broadcast", "reduce")
HEADER = struct.Struct("<IQQ")  # tag, offset in the message, bytes of the segment

LinkId = tuple[ChannelId, str, int, int]  # channel, "send" or "receive", peer, bytes of a slot


class Shared(Tagged):
    """Transport that sends long and repeated messages of collectives through shared memory, and others through gloo."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._links: dict[LinkId, Link | None] = {}  # None if the two ranks stay on gloo

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        if channel.kind not in ROOTED and not (paired and channel.kind in EXCHANGES):
            return super().start(channel, send, receive, paired)
        posted: list[Posted] = []
        linkable: dict[str, Described] = {}
        for verb, half in (("send", send), ("receive", receive)):
            if half is not None:
                x, peer = half
                message, tag = self.describe(channel, verb, x, peer)
                described = Described(x, peer, message, tag)
                repeated = message.number >= REPEATED and channel.kind != "all_to_all"
                if x.nbytes >= LONG_BYTES or repeated:
                    linkable[verb] = described
                else:
                    posted.append(self._post(channel, verb, described))
        self._connect(channel, linkable)
        moves: list[Move] = []
        for verb, described in linkable.items():
            link = self._links[link_id(channel, verb, described)]
            if link is None:
                posted.append(self._post(channel, verb, described))
            else:
                moves.append((described, link.send if verb == "send" else link.receive))
        if moves:
            posted.append((Exchange(self, moves), None, None))
        return posted

    def _post(self, channel: Channel, verb: str, half: Described) -> Posted:
        """Leave a message to gloo."""
        function = self.group.send if verb == "send" else self.group.recv
        return self.post_to_group(function, half.x, channel.peers[half.peer], half.tag, half.message)

    def wait(self, work: Any, message: Message | None) -> None:
        if isinstance(work, Exchange):
            work.run()
        else:
            super().wait(work, message)

    def drain(self) -> None:
        try:
            super().drain()
        finally:
            self._links.clear()  # this closes the links; a peer can still read what was sent

    def _connect(self, channel: Channel, linkable: dict[str, Described]) -> None:
        """Make the missing links of this exchange. Both ranks of a link learn whether it could be made."""
        ids = {verb: link_id(channel, verb, half) for verb, half in linkable.items()}
        missing = {verb: half for verb, half in linkable.items() if ids[verb] not in self._links}
        if not missing:
            return
        send, receive = missing.get("send"), missing.get("receive")
        ends = agree(self, channel, send, receive, NUM_SLOTS * slot_bytes(send) if send else 0)
        for verb, end in zip(("send", "receive"), ends):
            if verb in missing:
                self._links[ids[verb]] = Link(*end, slot_bytes(missing[verb])) if end else None


def slot_bytes(half: Described) -> int:
    """Return the bytes of a slot of the link for this message."""
    return SLOT_BYTES if half.x.nbytes >= LONG_BYTES else LONG_BYTES


def link_id(channel: Channel, verb: str, half: Described) -> LinkId:
    return channel.key, verb, half.peer, slot_bytes(half)


class Link:
    """One end of a link, with NUM_SLOTS slots. `free` counts writable slots, `moved` segments so far."""

    def __init__(self, connection: socket.socket, memory: int, bytes_of_slot: int):
        self._connection = connection
        self._free = NUM_SLOTS
        self._moved = 0
        self._bytes_of_slot = bytes_of_slot
        self._memory = mmap.mmap(memory, NUM_SLOTS * bytes_of_slot)
        os.close(memory)

    def send(self, tag: int, start: int, segment: torch.Tensor) -> None:
        if not self._free:
            self._free = len(self._read(NUM_SLOTS))
        self._next_slot(segment.numel()).copy_(segment)
        self._free -= 1
        self._connection.sendall(HEADER.pack(tag, start, segment.numel()))

    def receive(self, tag: int, start: int, segment: torch.Tensor) -> None:
        if self._read(HEADER.size) != HEADER.pack(tag, start, segment.numel()):
            # As with gloo, a message with another tag does not match, as if it had not arrived.
            time.sleep(self._connection.gettimeout() or 0.0)
            raise TimeoutError
        segment.copy_(self._next_slot(segment.numel()))
        # The sender may have ended: it does not wait until its last slots are read.
        with contextlib.suppress(ConnectionError):
            self._connection.send(b"f")

    def _next_slot(self, num_bytes: int) -> torch.Tensor:
        start = self._moved % NUM_SLOTS * self._bytes_of_slot
        self._moved += 1
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def _read(self, most: int) -> bytes:
        """Wait for bytes from the peer, and return them. Raises TimeoutError, or ConnectionError if the peer has ended."""
        data = self._connection.recv(most)
        if not data:
            raise ConnectionResetError("its process has ended")
        return data


# A half of an exchange, and the `send` or `receive` method of its link.
Move = tuple[Described, Callable[[int, int, torch.Tensor], None]]


class Exchange:
    """A send, a receive or both on links. Segments of both move in turn, so that neither waits for the other to end."""

    def __init__(self, transport: Shared, moves: list[Move]):
        self._transport = transport
        self._moves = [(half, _bytes(half.x), move) for half, move in moves]

    def run(self) -> None:
        for start in range(0, max(data.numel() for _, data, _ in self._moves), SLOT_BYTES):
            for half, data, move in self._moves:
                if start < data.numel():
                    self._move(half, move, start, data[start : start + SLOT_BYTES])

    def _move(
        self, half: Described, move: Callable[[int, int, torch.Tensor], None], start: int, segment: torch.Tensor
    ) -> None:  # fmt: skip
        rank = self._transport.rank
        waits = self._transport.waits
        thread = threading.get_ident()
        waits[thread] = half.message
        try:
            move(half.tag, start, segment)
        except TimeoutError:
            what = f"rank {rank} waited {self._transport.timeout_s:g} s to {half.message}"
            raise PeerLate(what, half.message.peer) from None
        except OSError as error:
            raise PeerLost(f"rank {rank} could not {half.message}: {error}") from None
        finally:
            waits.pop(thread, None)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes; a lazy conjugate or negative is computed first."""
    x = x.detach().resolve_conj().resolve_neg()
    # A single element may have any stride, and counts as contiguous.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
