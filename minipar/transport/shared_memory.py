"""The shared-memory transport, for gloo ranks on one machine: large messages of collectives do not go through a socket.


gloo copies a message into the kernel and out of it again. Here the sender copies it into slots of memory that both ranks
have mapped, and the receiver reads one slot while the sender fills the other. All other messages stay on gloo.

A link is one direction between two ranks on one channel, made at their first message (`linking.py`). It consists of a
memory file without a name, and a connection on which the sender writes a header per segment and the receiver a byte for
each slot that is free again. Nothing has a name that could outlive the ranks, and a rank's connections close when it ends.
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

SLOT_BYTES = 1 << 20
NUM_SLOTS = 2
LINKED_BYTES = 256 << 10  # messages of at least this size use a link; shorter ones are mostly latency
# A link moves data only during a wait, so only collectives that wait for each exchange as soon as it is posted use links.
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
HEADER = struct.Struct("<IQQ")  # tag, offset in the message, bytes of the segment

LinkId = tuple[ChannelId, str, int]  # channel, "send" or "receive", peer


class Shared(Tagged):
    """Transport that sends the large messages of collectives through shared memory, and all other messages through gloo."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._links: dict[LinkId, Link | None] = {}  # None if the two ranks stay on gloo

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        if channel.kind not in KINDS or not paired:
            return super().start(channel, send, receive, paired)
        outwards = self._describe_large(channel, "send", send)
        inwards = self._describe_large(channel, "receive", receive)
        left = None if outwards else send, None if inwards else receive
        posted = list(super().start(channel, *left, paired))
        self._connect(channel, outwards, inwards)
        linked: list[Move] = []
        for verb, half, function in (
            ("send", outwards, self.group.send),
            ("receive", inwards, self.group.recv),
        ):
            if half is None:
                continue
            link = self._links[channel.key, verb, half.peer]
            if link is None:
                peer = channel.peers[half.peer]
                posted.append(self.post_to_group(function, half.x, peer, half.tag, half.message))
            else:
                linked.append((half, link.send if verb == "send" else link.receive))
        if linked:
            posted.append((Exchange(self, linked), None, None))
        return posted

    def wait(self, work: Any, message: Message | None) -> None:
        if isinstance(work, Exchange):
            work.run()
        else:
            super().wait(work, message)

    def drain(self) -> None:
        try:
            super().drain()
        finally:
            self._links.clear()  # this closes the links; the peers have received all that was sent

    def _describe_large(self, channel: Channel, verb: str, half: Half | None) -> Described | None:
        if half is None:
            return None
        x, peer = half
        if x.nbytes < LINKED_BYTES:
            return None
        message, tag = self.describe(channel, verb, x, peer)
        return Described(x, peer, message, tag)

    def _connect(self, channel: Channel, send: Described | None, receive: Described | None) -> None:
        """Make the missing links of this exchange. Both ranks of a link learn whether it could be made."""
        if send and (channel.key, "send", send.peer) in self._links:
            send = None
        if receive and (channel.key, "receive", receive.peer) in self._links:
            receive = None
        if send is None and receive is None:
            return
        outwards, inwards = agree(self, channel, send, receive, SLOT_BYTES * NUM_SLOTS)
        if send:
            self._links[channel.key, "send", send.peer] = Link(*outwards) if outwards else None
        if receive:
            self._links[channel.key, "receive", receive.peer] = Link(*inwards) if inwards else None


class Link:
    """One end of a link, with slots [NUM_SLOTS, SLOT_BYTES]. `free` counts writable slots, `moved` segments so far."""

    def __init__(self, connection: socket.socket, memory: int):
        self._connection = connection
        self._free = NUM_SLOTS
        self._moved = 0
        slots = torch.frombuffer(mmap.mmap(memory, SLOT_BYTES * NUM_SLOTS), dtype=torch.uint8)
        self._slots = slots.view(NUM_SLOTS, SLOT_BYTES)
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
        slot = self._slots[self._moved % NUM_SLOTS, :num_bytes]
        self._moved += 1
        return slot

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
        self._moves = [(half, half.x.detach().view(-1).view(torch.uint8), move) for half, move in moves]

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
