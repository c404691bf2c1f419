"""The transport under every Comm: posts messages, waits for them with a deadline, and counts the bytes sent.

There are three implementations of one contract:

    tagged    `Tagged`, for gloo: a message is matched by its pair of ranks and its tag; no channel has to be prepared
    shared    `Shared` (shared_memory.py), as tagged, but large exchanges between ranks of one machine avoid the socket
    grouped   `Grouped` (grouped.py), for NCCL: a channel is a communicator, in which messages are matched by order alone

What a caller may rely on: `post` delivers a message to the rank `to`, if that rank posts the receive of it; messages of a
pair of ranks on one channel arrive in the order in which they were posted; an empty tensor is no message, on either
side; what is posted on one channel never meets what is posted on another; a wait that passes its deadline raises.

What a caller must do, which `tagged` only needs in part and NCCL in full (`checked.py` holds a program to it on gloo):

    channels    all ranks make the channels that they share in one order, outside every operation
    operations  the members of a channel run its operations in one order, each on the stream of the channel alone
    messages    a send and its receive have the same bytes, dtype and operation; both are on `device`
    groups      a send and a receive that wait for each other are posted in one `post`
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from minipar.comm.messages import (
    Channel,
    ChannelId,
    Message,
    MessageCounts,
    PeerLate,
    PeerLost,
    Traffic,
    require_device,
)
from minipar.comm.native import named_group
from minipar.comm.stream import Handle, ThreadStream, Waits
from minipar.comm.watch import Watch
from minipar.trace import Trace


class Transport:
    """One process's endpoint in a world, shared by all its Comms.

    group      the torch process group that carries the messages, or from whose ranks the grouped transport makes others
    ranks      the members of `group` as world ranks
    rank       this process's world rank
    timeout_s  seconds a single wait may take
    run        number of the run or world, part of every tag, so that no run receives messages of another
    node_size  ranks per machine, where the launcher knows it
    report     None, or a function that passes a value to the caller of `run`
    groups     (name, ranks) -> process group, for native collectives, and the communicators of the grouped transport
    namespace  prefix of the names of these groups
    """

    def __init__(self, group, ranks: tuple[int, ...], rank: int, device: torch.device, timeout_s: float, *,
                 run: int = 0, node_size: int | None = None, report: Callable[[Any], None] | None = None,
                 groups: dict | None = None, namespace: str = ""):  # fmt: skip
        self.group, self.ranks, self.rank, self.device = group, ranks, rank, device
        self.timeout_s, self.run, self.node_size, self.report = timeout_s, run, node_size, report
        self.namespace = namespace
        self.trace: Trace | None = None
        self.groups: dict[ChannelId, Any] = {} if groups is None else groups
        self.channels: dict[ChannelId, Channel] = {}
        self.waits: Waits = {}  # thread -> what it waits for
        self.watch: Watch | None = None  # of operations on a GPU, for which the host does not wait
        self._timeout = timedelta(seconds=timeout_s)

    # May a message be posted while earlier ones of its channel are under way? Else it waits for its turn on the stream.
    posts_ahead = True

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """Return the channel of this name and these ranks. The first call makes it."""
        key = ChannelId(name, ranks)
        if key not in self.channels:
            digest = zlib.crc32(repr((self.run, name, ranks)).encode())
            peers = tuple(map(self.ranks.index, ranks))
            channel = Channel(key, peers, digest, self.make_stream(key), self.device)
            self.prepare(channel)
            self.channels[key] = channel
        return self.channels[key]

    def ranks_per_node(self, ranks: tuple[int, ...]) -> int | None:
        """Return the number of `ranks` per node; None if unknown, unequal, not contiguous, one per node, or all on one."""
        if self.node_size is None:
            return None
        nodes = [r // self.node_size for r in ranks]
        g = nodes.count(nodes[0])
        blocks = [node for node in dict.fromkeys(nodes) for _ in range(g)]
        return g if nodes == blocks and 1 < g < len(ranks) else None

    def process_group(self, key: ChannelId):
        """Return the torch process group of these ranks, in this order. The first call creates it and is collective."""
        if key == ChannelId("world", self.ranks):
            return self.group
        if key not in self.groups:
            self.groups[key] = named_group(list(key.ranks), self.namespace + key.name, self.timeout_s)
        return self.groups[key]

    def release_groups(self) -> None:
        """Release the process groups before the interpreter ends, or a thread that frees a tensor aborts the process."""
        self.group = None
        self.groups.clear()

    def wait(self, work, message: Message) -> None:
        """Wait for a posted message. Raises PeerLate past the deadline, PeerLost where the connection broke."""
        thread, start_s = threading.get_ident(), time.monotonic()
        self.waits[thread] = message
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if time.monotonic() - start_s >= 0.9 * self.timeout_s:
                raise PeerLate(
                    f"rank {self.rank} waited {self.timeout_s:g} s to {message}", message.peer
                ) from None
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None
        finally:
            self.waits.pop(thread, None)

    def drain(self) -> None:
        """Wait until every operation of this rank has ended, those too that nobody has waited for."""
        for channel in list(self.channels.values()):
            if isinstance(channel.stream, ThreadStream):
                channel.stream.drain()

    def counts(self) -> MessageCounts:
        """Return what this rank has posted and what it waits for. All ranks' counts together explain a failure."""
        counts = MessageCounts(list(self.waits.values()), {}, {})
        for channel in list(self.channels.values()):
            for table, posted in ((counts.sent, channel.sent), (counts.received, channel.received)):
                for (peer, lane), last in list(posted.items()):
                    table[channel.key, lane, peer] = last
        return counts

    # Every step of a collective runs the next three, right after a copy that has emptied the CPU caches.

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        """Post a send of x to rank `to` and a receive into `out` from rank `source`; `to` or `source` may be None."""
        for tensor in (x, out):
            if tensor is not None and tensor.device != self.device:
                require_device(tensor, self.device, channel.key)
        sent = None
        if to is not None and x.numel():
            sent = x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x
        works = self.start(channel, sent, to, out if source is not None and out.numel() else None, source)
        if sent is not None:
            traffic.book(channel.kind or kind, sent.nbytes)
        return PendingMessages(self, works, out)

    def note(self, channel: Channel, verb: str, num_bytes: int, peer: int, label: str) -> Message:
        """Count a message that is about to be posted, and describe it."""
        # Messages of collectives and point-to-point messages are numbered separately: both may be pending at once.
        lane = "p2p" if channel.kind is None else "collective"
        posted = channel.sent if verb == "send" else channel.received
        key = (channel.key.ranks[peer], lane)
        number = posted[key][0] if key in posted else 0
        posted[key] = (number + 1, num_bytes, label)
        return Message(verb, key[0], channel.key, lane, number, num_bytes, label)

    def hand_over(self, function: Callable, x: torch.Tensor, peer: int, tag: int, message: Message) -> tuple:
        """Call a process group's send or recv; return what is to be waited for. Raises PeerLost where the peer is gone."""
        try:
            return function([x], peer, tag), message, x
        except RuntimeError as error:  # the connection is known to be broken
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None

    # What a transport implements ----------------------------------------------------------------------------------

    def make_stream(self, key: ChannelId):
        """Return the stream of a new channel."""
        raise NotImplementedError

    def prepare(self, channel: Channel) -> None:
        """Prepare a channel; called by all its ranks when they make it."""

    def start(self, channel: Channel, x, to, out, source) -> Sequence[tuple]:
        """Post a send of x and a receive into `out`, each None or not empty; return what is to be waited for."""
        raise NotImplementedError

    def before_native(self, channel: Channel, x: torch.Tensor) -> None:
        """Prepare for one of torch's own collectives of x; called by all ranks of the channel, on its stream."""


class PendingMessages:
    """Posted messages: `wait()` returns the received tensor once all of them have been sent and received."""

    def __init__(self, transport: Transport, works: Sequence[tuple], out: torch.Tensor | None):
        self._transport = transport
        self._works = works  # (work, message, tensor): keeps the tensor alive until its message is sent
        self._out = out

    def wait(self) -> torch.Tensor | None:
        for work, message, _ in self._works:
            self._transport.wait(work, message)
        self._works = ()
        return self._out


class PostedLater:
    """Messages that the stream posts once the operations before them have ended; it does not wait for them itself."""

    def __init__(self, posting: Handle):
        self._posting = posting

    def wait(self) -> torch.Tensor | None:
        return self._posting.wait().wait()


class Tagged(Transport):
    """The gloo transport. A message's tag is a digest of its run, name, ranks, operation, dtype, number and length.

    So a receive only matches a send of the same operation, dtype and length. A message of another length is never delivered
    (gloo would abort the process), nor is a message left over from an earlier run.
    """

    def make_stream(self, key: ChannelId) -> ThreadStream:
        return ThreadStream(str(key), self.waits)

    def start(self, channel: Channel, x, to, out, source) -> Sequence[tuple]:
        """Post the send before the receive: gloo then writes the message from its own thread, once the peer is ready.

        With the receive posted first, the peer's message could arrive while this thread writes its own on the same
        connection, and gloo's thread would poll that connection in vain.
        """
        works = []
        if x is not None:
            works.append(self._post_one(channel, "send", self.group.send, x, to))
        if out is not None:
            works.append(self._post_one(channel, "receive", self.group.recv, out, source))
        return works

    def _post_one(self, channel: Channel, verb: str, function: Callable, x: torch.Tensor, peer: int) -> tuple:
        message, tag = self.describe(channel, verb, x, peer)
        return self.hand_over(function, x, channel.peers[peer], tag, message)

    def describe(self, channel: Channel, verb: str, x: torch.Tensor, peer: int) -> tuple[Message, int]:
        """Count a message that is about to be posted; return its description and its tag."""
        num_bytes, (label, label_bytes) = x.nbytes, channel.label(x.dtype)
        message = self.note(channel, verb, num_bytes, peer, label)
        what = b"%s %d %d" % (label_bytes, message.number, num_bytes)
        return message, zlib.crc32(what, channel.digest) >> 1  # 31 bits
