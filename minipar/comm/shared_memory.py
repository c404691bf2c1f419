"""The shared-memory transport, for ranks of one machine on gloo: what rings and halving exchange never passes a socket.

gloo copies a message into the kernel and out of it again. Here the sender copies it into slots of memory that both ranks
have mapped, and the receiver reads one slot while the sender fills the other. All other messages stay on gloo.

A link is one direction between two ranks on one channel, made at its first message: a memory file without a name, and a
connection, on which the sender writes a header per segment and the receiver a byte per slot that is free again. Nothing
has a name that could outlive the ranks, and the end of a rank is the end of its connections. Ranks that cannot be linked,
on two machines or without memory, tell each other so, and go on with gloo.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from minipar.comm.messages import Channel, Message, PeerLate, PeerLost
from minipar.comm.transport import Tagged

SLOT_BYTES, NUM_SLOTS = 1 << 20, 2
LINKED_BYTES = 256 << 10  # messages from here on; a shorter one is mostly latency
# In these, an exchange with two peers is waited for as soon as it is posted: on a link nothing moves but in a wait.
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
HEADER = struct.Struct("<IQQ")  # tag, offset in the message, bytes of the segment
WORDS_BYTES = 64  # of the messages by which two ranks agree on a link


class Half(NamedTuple):
    """A send or a receive of the tensor x."""

    x: torch.Tensor
    peer: int
    message: Message
    tag: int


class Shared(Tagged):
    """Transport that sends the large messages of collectives through shared memory, and all others through gloo."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._links: dict[tuple, Link | None] = {}  # (channel, verb, peer) -> None where the two stay on gloo

    def start(self, channel: Channel, x, to, out, source) -> Sequence[tuple]:
        if channel.kind not in KINDS or to is None or source is None:
            return super().start(channel, x, to, out, source)
        send, receive = self._half(channel, "send", x, to), self._half(channel, "receive", out, source)
        works = list(super().start(channel, None if send else x, to, None if receive else out, source))
        self._connect(channel, send, receive)
        linked = []
        for verb, half, function in (("send", send, self.group.send), ("receive", receive, self.group.recv)):
            if half and (link := self._links[channel.key, verb, half.peer]):
                linked.append((half, link.send if verb == "send" else link.receive))
            elif half:
                works.append(
                    self.hand_over(function, half.x, channel.peers[half.peer], half.tag, half.message)
                )
        return [*works, (Exchange(self, linked), None, None)] if linked else works

    def wait(self, work, message: Message | None) -> None:
        if isinstance(work, Exchange):
            work.run()
        else:
            super().wait(work, message)

    def drain(self) -> None:
        super().drain()
        self._links.clear()  # closed here: their peers have what was sent

    def _half(self, channel: Channel, verb: str, x: torch.Tensor | None, peer: int) -> Half | None:
        if x is None or x.nbytes < LINKED_BYTES or not x.is_contiguous():
            return None
        return Half(x, peer, *self.describe(channel, verb, x, peer))

    # Making links -------------------------------------------------------------------------------------------------

    def _connect(self, channel: Channel, send: Half | None, receive: Half | None) -> None:
        """Make the links of this exchange that are missing. Both ranks of a link learn whether it came to be."""
        outwards, inwards = (
            (channel.key, "send", send and send.peer),
            (channel.key, "receive", receive and receive.peer),
        )
        send, receive = (
            send if outwards not in self._links else None,
            receive if inwards not in self._links else None,
        )
        posted = []
        if send:
            listener, memory = _offer(self.rank)
            posted.append(self._tell(channel, send, listener.getsockname() if listener else b""))
        if receive:
            connection = _connection_to(self._hear(channel, receive), self.timeout_s)
            posted.append(self._tell(channel, receive, b"yes" if connection else b"no"))
        try:
            if send:
                agreed = self._hear(channel, send) == b"yes"
                self._links[outwards] = _accepted(listener, memory, agreed, self.timeout_s)
            if receive:
                self._links[inwards] = _received(connection) if connection else None
        except OSError as error:
            raise PeerLost(f"rank {self.rank} could not share memory with its peer: {error}") from None
        for work, message, _ in posted:
            self.wait(work, message)

    def _tell(self, channel: Channel, half: Half, words: bytes) -> tuple:
        """Send words about a link to its other rank through gloo."""
        x = torch.frombuffer(bytearray(words.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
        return self.hand_over(self.group.send, x, channel.peers[half.peer], half.tag, half.message)

    def _hear(self, channel: Channel, half: Half) -> bytes:
        memory = bytearray(WORDS_BYTES)
        x, place = torch.frombuffer(memory, dtype=torch.uint8), channel.peers[half.peer]
        work, message, _ = self.hand_over(self.group.recv, x, place, half.tag, half.message)
        self.wait(work, message)
        return memory.rstrip(b"\0")


def _offer(rank: int) -> tuple[socket.socket | None, int]:
    """Make a memory file, and a socket on which its receiver asks for it; the socket is None where that fails."""
    try:
        memory = os.memfd_create("minipar")
        os.posix_fallocate(memory, 0, SLOT_BYTES * NUM_SLOTS)  # else a write to full memory ends the process
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0minipar-{secrets.token_hex(16)}")  # in no file system, and on no other machine
        listener.listen(1)
        return listener, memory
    except (OSError, AttributeError) as error:
        print(f"rank {rank} sends through gloo, as it has no memory to share: {error}", file=sys.stderr)
        return None, -1


def _connection_to(address: bytes, timeout_s: float) -> socket.socket | None:
    """Connect to an address without its zeros; None without an address, on another machine, in another container."""
    if address:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(b"\0" + address.lstrip(b"\0"))
            return connection
        except OSError:
            pass
    return None


def _accepted(listener: socket.socket | None, memory: int, agreed: bool, timeout_s: float) -> Link | None:
    """Pass the memory to the receiver, which has connected if it agreed."""
    if listener is None:
        return None
    with listener:
        if not agreed:
            os.close(memory)
            return None
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    connection.settimeout(timeout_s)
    socket.send_fds(connection, [b"m"], [memory])
    return Link(connection, memory)


def _received(connection: socket.socket) -> Link:
    _, memory, *_ = socket.recv_fds(connection, 1, 1)
    if not memory:
        raise ConnectionResetError("its process has ended")
    return Link(connection, memory[0])


# Moving segments ----------------------------------------------------------------------------------------------------


class Link:
    """One end of a link. slots [NUM_SLOTS, SLOT_BYTES]; free: slots to write to; moved: segments sent or received."""

    def __init__(self, connection: socket.socket, memory: int):
        self._connection, self._free, self._moved = connection, NUM_SLOTS, 0
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
            time.sleep(self._connection.gettimeout())  # as with gloo: a message of another tag is none
            raise TimeoutError
        segment.copy_(self._next_slot(segment.numel()))
        with contextlib.suppress(ConnectionError):  # the sender may have ended: it waits for no slot
            self._connection.send(b"f")

    def _next_slot(self, num_bytes: int) -> torch.Tensor:
        slot = self._slots[self._moved % NUM_SLOTS, :num_bytes]
        self._moved += 1
        return slot

    def _read(self, most: int) -> bytes:
        """Wait for what the peer writes. Raises TimeoutError, or ConnectionError where the peer has ended."""
        data = self._connection.recv(most)
        if not data:
            raise ConnectionResetError("its process has ended")
        return data


class Exchange:
    """A send, a receive or both on links, a segment of each in turn: neither waits for the other's whole message."""

    def __init__(self, transport: Shared, halves: list[tuple]):
        self._transport = transport
        self._halves = [(half, half.x.detach().view(-1).view(torch.uint8), move) for half, move in halves]

    def run(self) -> None:
        rank, waits, thread = self._transport.rank, self._transport.waits, threading.get_ident()
        for start in range(0, max(data.numel() for _, data, _ in self._halves), SLOT_BYTES):
            for half, data, move in self._halves:
                if start < data.numel():
                    waits[thread] = half.message
                    try:
                        move(half.tag, start, data[start : start + SLOT_BYTES])
                    except TimeoutError:
                        what = f"rank {rank} waited {self._transport.timeout_s:g} s to {half.message}"
                        raise PeerLate(what, half.message.peer) from None
                    except OSError as error:
                        raise PeerLost(f"rank {rank} could not {half.message}: {error}") from None
                    finally:
                        waits.pop(thread, None)
