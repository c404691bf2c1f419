"""Make a link of shared memory: two ranks agree through gloo whether they can share memory, and one passes it to the other.

The sender makes a memory file without a name, and sends through gloo the address of a socket. The receiver connects to it,
answers whether that worked, and is sent the file's descriptor. If either side fails, because the ranks are on two machines
or memory is short, both learn of it and continue with gloo.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from typing import NamedTuple

import torch

from minipar.transport.errors import PeerLost
from minipar.transport.messages import Channel, Message
from minipar.transport.transport import Posted, Transport

WORDS_BYTES = 64  # size of the messages by which two ranks agree on a link


class Described(NamedTuple):
    """A send or a receive of the tensor x, with its message and tag."""

    x: torch.Tensor
    peer: int
    message: Message
    tag: int


class Ends(NamedTuple):
    """One rank's end of a link: its connection to the other rank, and the descriptor of the memory."""

    connection: socket.socket
    memory: int


def agree(
    transport: Transport,
    channel: Channel,
    send: Described | None,
    receive: Described | None,
    num_bytes: int,
) -> tuple[Ends | None, Ends | None]:
    """Make links of `num_bytes` for a send and a receive. Return this rank's end of each; None: the two ranks use gloo."""
    rank = transport.rank
    outwards = inwards = None
    posted = []
    if send:
        offer = _offer(rank, num_bytes)
        posted.append(_tell(transport, channel, send, offer[0].getsockname() if offer else b""))
    if receive:
        connection = _connection_to(_hear(transport, channel, receive), transport.timeout_s)
        posted.append(_tell(transport, channel, receive, b"yes" if connection else b"no"))
    try:
        if send:
            agreed = _hear(transport, channel, send) == b"yes"
            outwards = _accepted(*offer, agreed, transport.timeout_s) if offer else None
        if receive and connection:
            inwards = _received(connection)
    except OSError as error:
        raise PeerLost(f"rank {rank} could not share memory with its peer: {error}") from None
    for work, message, _ in posted:
        transport.wait(work, message)
    return outwards, inwards


def _tell(transport: Transport, channel: Channel, of: Described, words: bytes) -> Posted:
    """Send words about a link through gloo to the rank at its other end."""
    x = torch.frombuffer(bytearray(words.ljust(WORDS_BYTES, b"\0")), dtype=torch.uint8)
    return transport.post_to_group(transport.group.send, x, channel.peers[of.peer], of.tag, of.message)


def _hear(transport: Transport, channel: Channel, of: Described) -> bytes:
    memory = bytearray(WORDS_BYTES)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    work, message, _ = transport.post_to_group(
        transport.group.recv, x, channel.peers[of.peer], of.tag, of.message
    )
    transport.wait(work, message)
    return bytes(memory.rstrip(b"\0"))


def _offer(rank: int, num_bytes: int) -> tuple[socket.socket, int] | None:
    """Make a socket, and a memory file for which the receiver asks on it; return None if that fails."""
    memory = None
    try:
        memory = os.memfd_create("minipar")
        os.posix_fallocate(memory, 0, num_bytes)  # otherwise a write to full memory would end the process
        listener = socket.socket(socket.AF_UNIX)
        # An abstract name: it is in no file system, and not reachable from other machines.
        listener.bind(f"\0minipar-{secrets.token_hex(16)}")
        listener.listen(1)
        return listener, memory
    except (OSError, AttributeError) as error:
        if memory is not None:
            os.close(memory)
        print(f"rank {rank} sends through gloo, as it has no memory to share: {error}", file=sys.stderr)
        return None


def _connection_to(address: bytes, timeout_s: float) -> socket.socket | None:
    """Connect to an address that is padded with zeros; return None if it is empty, or in another machine or container."""
    if address:
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_s)
            connection.connect(b"\0" + address.lstrip(b"\0"))
            return connection
    return None


def _accepted(listener: socket.socket, memory: int, agreed: bool, timeout_s: float) -> Ends | None:
    """Pass the memory to the receiver, which connects only if it agreed to the link."""
    with listener:
        if not agreed:
            os.close(memory)
            return None
        listener.settimeout(timeout_s)
        connection, _ = listener.accept()
    connection.settimeout(timeout_s)
    socket.send_fds(connection, [b"m"], [memory])
    return Ends(connection, memory)


def _received(connection: socket.socket) -> Ends:
    _, memory, *_ = socket.recv_fds(connection, 1, 1)
    if not memory:
        raise ConnectionResetError("its process has ended")
    return Ends(connection, memory[0])
