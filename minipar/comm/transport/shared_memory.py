"""The shared-memory transport, for gloo ranks on one machine: collectives send through memory that two ranks share.

gloo copies a message into the kernel and out of it again, and a thread of its own receives it and wakes the waiting one.
Here the sender copies the message into slots of memory that both ranks have mapped, and the receiver reads one slot while
the sender fills the other. A short message is worth it only if others follow, so the first ones of a channel stay on gloo.
So do the messages of pipelines, and the short ones of all-to-all, many of which are under way at once.

A link (`linking.py`) is one direction between two ranks on one channel, for short messages or for long ones: a direction
may have one of each, with slots of different sizes. It consists of a memory file without a name, and a connection on which
the sender writes a header per segment and the receiver a byte for each slot that is free again. A link on which a message
has failed is closed. Nothing has a name that could outlive the ranks, and a rank's connections close when it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from minipar.comm.transport.linking import Described, agree
from minipar.comm.transport.messages import Channel, ChannelId, Half, Message, OnLink
from minipar.comm.transport.transport import Posted, Tagged

SLOT_BYTES = 1 << 20  # of links for long messages
NUM_SLOTS = 2
LONG_BYTES = 256 << 10  # messages of at least this size are long; others fit into one small slot of this size
REPEATED = 32  # a short message uses a link if this many messages of its channel went before it, between the same ranks
# A link moves data only while its rank waits for it. So an exchange may use links if its collective waits for exchanges in
# the order of posting.
EXCHANGES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "ring_attention",
    "ring_attention_gradients",
)
# A send without a receive may use links where ranks wait along a tree, and never for each other.
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
        moves: list[tuple[Described, Link]] = []
        for verb, described in linkable.items():
            link = self._links[link_id(channel, verb, described)]
            if link is None:
                posted.append(self._post(channel, verb, described))
            else:
                moves.append((described, link))
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

    def close(self) -> None:
        for link in self._links.values():
            if link is not None:
                link.close()
        self._links.clear()

    def release_groups(self) -> None:
        self.close()
        super().release_groups()

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
    """One end of a link, with NUM_SLOTS slots. `free` counts writable slots, `moved` segments so far.

    Once closed, it raises ConnectionAbortedError for every message. It must be closed after a segment that failed, since
    its two ends may then disagree on the next slot.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, bytes_of_slot: int):
        self.connection = connection
        self._closed = False
        self._free = NUM_SLOTS
        self._moved = 0
        self._bytes_of_slot = bytes_of_slot
        self._memory = memory

    def move(self, verb: str, tag: int, offset: int, segment: torch.Tensor) -> None:
        """Send a segment, or receive one."""
        if self._closed:
            raise ConnectionAbortedError("an earlier message between the two ranks has failed")
        if verb == "send":
            self._send(tag, offset, segment)
        else:
            self._receive(tag, offset, segment)

    def close(self) -> None:
        self._closed = True
        self.connection.close()

    def _send(self, tag: int, offset: int, segment: torch.Tensor) -> None:
        if not self._free:
            self._free = len(self._read(NUM_SLOTS))
        self._next_slot(segment.numel()).copy_(segment)
        self._free -= 1
        self.connection.sendall(HEADER.pack(tag, offset, segment.numel()))

    def _receive(self, tag: int, offset: int, segment: torch.Tensor) -> None:
        if self._read(HEADER.size) != HEADER.pack(tag, offset, segment.numel()):
            # As with gloo, a message with another tag does not match, as if it had not arrived.
            time.sleep(self.connection.gettimeout() or 0.0)
            raise TimeoutError
        segment.copy_(self._next_slot(segment.numel()))
        # The sender may have ended: it does not wait until its last slots are read.
        with contextlib.suppress(ConnectionError):
            self.connection.send(b"f")

    def _next_slot(self, num_bytes: int) -> torch.Tensor:
        start = self._moved % NUM_SLOTS * self._bytes_of_slot
        self._moved += 1
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def _read(self, most: int) -> bytes:
        """Wait for bytes from the peer, and return them. Raises TimeoutError, or ConnectionError if the peer has ended."""
        data = self.connection.recv(most)
        if not data:
            raise ConnectionResetError("its process has ended")
        return data


class Exchange:
    """A send, a receive or both on links. Segments of both move in turn, so that neither waits for the other to end."""

    def __init__(self, transport: Shared, moves: list[tuple[Described, Link]]):
        self._transport = transport
        self._moves = [(described, _bytes(described.x), link) for described, link in moves]

    def run(self) -> None:
        """Move all segments. If one fails, close the links."""
        try:
            for offset in range(0, max(data.numel() for _, data, _ in self._moves), SLOT_BYTES):
                for described, data, link in self._moves:
                    if offset < data.numel():
                        self._move(described, link, offset, data[offset : offset + SLOT_BYTES])
        except BaseException:
            for _, _, link in self._moves:
                link.close()
            raise

    def _move(self, described: Described, link: Link, offset: int, segment: torch.Tensor) -> None:
        message, waits, thread = described.message, self._transport.waits, threading.get_ident()
        waits[thread] = OnLink(message, link.connection)
        try:
            link.move(message.verb, described.tag, offset, segment)
        except TimeoutError:
            raise self._transport.late(message) from None
        except OSError as error:
            raise self._transport.lost(message, error) from None
        finally:
            waits.pop(thread, None)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes; a lazy conjugate or negative is computed first."""
    x = x.detach().resolve_conj().resolve_neg()
    # A single element may have any stride, and counts as contiguous.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
