"""Make a link of shared memory: two ranks agree through gloo whether they can share memory, and one passes it to the other.

The sender makes a memory file without a name, and sends through gloo the address of a socket. The receiver connects to it,
and answers through gloo whether that worked. Then the sender passes the file's descriptor over the connection, and the
receiver maps the file and says so. If either side fails, because the ranks are on two machines, or memory or descriptors
are short, both learn of it and continue with gloo.

Each of these steps waits only for earlier steps of other ranks, so ranks that make their links in a ring do not wait for
each other in a circle.
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
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import NamedTuple

import torch

from minipar.comm.transport.messages import Channel, Message, OnLink
from minipar.comm.transport.transport import Posted, Transport

WORDS_BYTES = 64  # size of the messages by which two ranks agree on a link
MOST_S = 2**31 / 1000 - 1  # the longest deadline that a socket keeps
CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a connection


class Described(NamedTuple):
    """A send or a receive of the tensor x, with its message and tag."""

    x: torch.Tensor
    peer: int
    message: Message
    tag: int


class Ends(NamedTuple):
    """One rank's end of a link: its connection to the other rank, and the memory that both have mapped."""

    connection: socket.socket
    memory: mmap.mmap


class Offer(NamedTuple):
    """Memory to be shared, its descriptor, and the socket on which the receiver asks for it."""

    listener: socket.socket
    memory: mmap.mmap
    descriptor: int

    def close(self) -> None:
        """Close what only the passing needs; the memory stays mapped."""
        self.listener.close()
        os.close(self.descriptor)


def agree(
    transport: Transport,
    channel: Channel,
    send: Described | None,
    receive: Described | None,
    num_bytes: int,
) -> tuple[Ends | None, Ends | None]:
    """Make links for a send, of `num_bytes`, and for a receive. Return this rank's end of each.

    An end is None if it was not asked for, or if its two ranks cannot share memory. Raises PeerLate past the deadline.
    """
    offer = connection = passed = outwards = inwards = None
    told = []
    with ExitStack() as closing:
        if send:
            offer = _offer(transport.rank, num_bytes)
            if offer:
                closing.callback(offer.close)
            told.append(_tell(transport, channel, send, offer.listener.getsockname() if offer else b""))
        if receive:
            connection = _connection_to(_hear(transport, channel, receive), transport.timeout_s)
            told.append(_tell(transport, channel, receive, b"yes" if connection else b"no"))
        if send and _hear(transport, channel, send) == b"yes" and offer:
            passed = _unless_it_fails(
                transport, send.message, offer.listener, partial(_passed, offer, transport.timeout_s)
            )
        if receive and connection:
            inwards = _unless_it_fails(transport, receive.message, connection, partial(_received, connection))
        if send and passed:
            outwards = _unless_it_fails(
                transport, send.message, passed.connection, partial(_confirmed, passed)
            )
        for work, message, _ in told:
            transport.wait(work, message)
    return outwards, inwards


def _tell(transport: Transport, channel: Channel, of: Described, words: bytes) -> Posted:
    """Send words about a link through gloo to the rank at its other end."""
    x = torch.frombuffer(bytearray(words.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
    return transport.post_to_group(
        transport.group.send, x, channel.peers[of.peer], _tag_of_words(of), of.message
    )


def _hear(transport: Transport, channel: Channel, of: Described) -> bytes:
    memory = bytearray(WORDS_BYTES)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    work, message, _ = transport.post_to_group(
        transport.group.recv, x, channel.peers[of.peer], _tag_of_words(of), of.message
    )
    transport.wait(work, message)
    return bytes(memory.rstrip(b"\0"))


def _tag_of_words(of: Described) -> int:
    """Not the message's own tag: a rank that sends the message through gloo would be taken to speak of a link."""
    return zlib.crc32(b"link", of.tag) >> 1


def _offer(rank: int, num_bytes: int) -> Offer | None:
    """Make memory, and a socket on which the receiver asks for it; return None if that fails."""
    if not hasattr(os, "memfd_create"):  # not Linux, or a Python built for an old one
        return None
    with ExitStack() as undo:
        try:
            descriptor = os.memfd_create("minipar")
            undo.callback(os.close, descriptor)
            os.posix_fallocate(
                descriptor, 0, num_bytes
            )  # otherwise a write to full memory would end the process
            memory = undo.enter_context(mmap.mmap(descriptor, num_bytes))
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            # An abstract name: it is in no file system, and not reachable from other machines.
            listener.bind(f"\0minipar-{secrets.token_hex(16)}")
            listener.listen(1)
        except OSError as error:
            _say(f"rank {rank} sends through gloo, as it has no memory to share: {error}")
            return None
        undo.pop_all()
    return Offer(listener, memory, descriptor)


@cache
def _say(sentence: str) -> None:
    """Print a sentence once."""
    print(sentence, file=sys.stderr)


def _connection_to(address: bytes, timeout_s: float) -> socket.socket | None:
    """Connect to an address that is padded with zeros; return None if it is empty, or in another machine or container."""
    if address:
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(min(timeout_s, MOST_S))
            connection.connect(b"\0" + address.lstrip(b"\0"))
            return connection
    return None


def _unless_it_fails(
    transport: Transport, message: Message, on: socket.socket, step: Callable[[], Ends]
) -> Ends | None:
    """Run a step that waits for the peer on a socket; return None if it fails on this rank or on the peer's."""
    thread = threading.get_ident()
    transport.waits[thread] = OnLink(message, on)
    try:
        return step()
    except TimeoutError:
        raise transport.late(message) from None
    except OSError:
        return None
    finally:
        transport.waits.pop(thread, None)


def _passed(offer: Offer, timeout_s: float) -> Ends:
    """Pass the memory to the receiver, which has connected."""
    with (
        offer.listener
    ):  # closed also where this fails: the receiver's connection then ends, and it does not wait
        offer.listener.settimeout(min(timeout_s, MOST_S))
        connection, _ = offer.listener.accept()
    connection.settimeout(min(timeout_s, MOST_S))
    with ExitStack() as undo:
        undo.enter_context(connection)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(peer)[1] != os.getuid():
            raise PermissionError("a process of another user has connected")
        socket.send_fds(connection, [b"m"], [offer.descriptor])
        undo.pop_all()
    return Ends(connection, offer.memory)


def _received(connection: socket.socket) -> Ends:
    """Map the memory that the sender passes, and say so."""
    with ExitStack() as undo:
        undo.enter_context(connection)
        _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionResetError("no memory came")
        try:
            memory = mmap.mmap(descriptors[0], 0)
        finally:
            os.close(descriptors[0])
        connection.sendall(b"m")
        undo.pop_all()
    return Ends(connection, memory)


def _confirmed(ends: Ends) -> Ends:
    """Wait until the receiver has mapped the memory."""
    if not ends.connection.recv(1):
        ends.connection.close()
        raise ConnectionResetError("the receiver could not map the memory")
    return ends
