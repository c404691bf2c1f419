"""The transport under every Comm: posts messages, waits for them with a deadline, and counts the bytes sent.

There are three implementations of one contract:

    tagged    `Tagged`, for gloo: a message is matched by its sender, receiver and tag; channels need no preparation
    shared    `Shared` (shared_memory.py): like tagged, but long and repeated messages within a machine avoid the socket
    grouped   `Grouped` (grouped.py), for NCCL: a channel is a communicator, in which messages are matched by order alone

A caller may rely on the following. `post` delivers a message to the rank `to` if that rank posts its receive. Messages of a
pair of ranks on one channel arrive in the order in which they were posted. An empty tensor is not a message, on either
side. Messages of different channels never meet. A wait that passes its deadline raises.

A caller must obey these rules. `tagged` needs only some of them, NCCL all (`checked.py` enforces them on gloo):

    channels    all ranks make the channels that they share in the same order, outside every operation
    operations  the members of a channel run its operations in the same order, and only on the channel's stream
    messages    a send and its receive have the same bytes, dtype and operation; both are on `device`
    groups      a send and a receive that wait for each other are posted in one `post`
    exchanges   both halves of a message belong to an exchange, or neither does
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.transport.errors import PeerLate, PeerLost, peer_lost, require_device
from minipar.comm.transport.messages import Channel, ChannelId, Half, Message
from minipar.comm.transport.process_groups import named_group
from minipar.comm.transport.stream import Pending, Stream, ThreadStream, Waits
from minipar.comm.transport.traffic import Traffic
from minipar.comm.transport.watch import Watch
from minipar.support.trace import Trace

# The work to wait for, its message, and its tensor, which must stay alive until then.
Posted = tuple[Any, Message | None, Tensor | None]


class Transport:
    """One process's endpoint in a world, shared by all its Comms.

    group      the torch process group that carries the messages; the grouped transport makes other groups of its ranks
    ranks      the members of `group` as world ranks
    rank       this process's world rank
    timeout_s  seconds a single wait may take
    run        number of the run or world, part of every tag, so that no run receives messages of another run
    node_size  ranks per machine, if the launcher knows it
    report     None, or a function that passes a value to the caller of `run`
    ask        None, or a function that passes a question to the caller of `run` and returns its answer
    groups     (name, ranks) -> process group, for native collectives, and the communicators of the grouped transport
    namespace  prefix of the names of these groups
    """

    # Whether a message may be posted while earlier messages of its channel are under way. If not, it waits for them.
    posts_ahead = True

    def __init__(
        self,
        group: Any,
        ranks: tuple[int, ...],
        rank: int,
        device: torch.device,
        timeout_s: float,
        *,
        run: int = 0,
        node_size: int | None = None,
        report: Callable[[Any], None] | None = None,
        ask: Callable[[Any], Any] | None = None,
        groups: dict[ChannelId, dist.ProcessGroup] | None = None,
        namespace: str = "",
    ):
        self.group = group
        self.ranks = ranks
        self.rank = rank
        self.device = device
        self.timeout_s = timeout_s
        self.run = run
        self.node_size = node_size
        self.report = report
        self.ask = ask
        self.namespace = namespace
        self.trace: Trace | None = None
        self.groups: dict[ChannelId, dist.ProcessGroup] = {} if groups is None else groups
        self.channels: dict[ChannelId, Channel] = {}
        self.waits: Waits = {}  # thread -> what it waits for
        self.watch: Watch | None = None  # watches operations on a GPU, for which the host does not wait
        self._timeout = timedelta(seconds=timeout_s)

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """Return the channel of this name and these ranks. The first call makes it."""
        key = ChannelId(name, ranks)
        if key not in self.channels:
            peers = tuple(self.ranks.index(rank) for rank in ranks)
            digest = zlib.crc32(repr((self.run, name, ranks)).encode())
            channel = Channel(key, peers, digest, self.make_stream(key), self.device)
            self.prepare(channel)
            self.channels[key] = channel
        return self.channels[key]

    # The next three methods are kept short: each step of a collective runs them after a copy that emptied the CPU caches.

    def post(
        self,
        channel: Channel,
        kind: str,
        x: Tensor | None,
        to: int | None,
        out: Tensor | None,
        source: int | None,
        traffic: Traffic,
    ) -> PendingMessages:
        """Post a send of x to rank `to` and a receive into `out` from rank `source`; `to` or `source` may be None."""
        for tensor in (x, out):
            if tensor is not None and tensor.device != self.device:
                require_device(tensor, self.device, channel.key)
        send = receive = None
        if to is not None and x is not None and x.numel():
            send = (x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x, to)
        if source is not None and out is not None and out.numel():
            receive = (out, source)
        # `paired` is True even if one tensor is empty, because both ranks of a message must choose alike how to send it.
        paired = to is not None and source is not None
        posted = self.start(channel, send, receive, paired)
        if send:
            traffic.book(channel.kind or kind, send[0].nbytes)
        return PendingMessages(self, posted, out)

    def note(self, channel: Channel, verb: str, num_bytes: int, peer: int, label: str) -> Message:
        """Count a message that is about to be posted, and describe it."""
        # Messages of collectives and point-to-point messages are numbered separately: both may be pending at once.
        lane = "p2p" if channel.kind is None else "collective"
        posted = channel.sent if verb == "send" else channel.received
        key = (channel.key.ranks[peer], lane)
        number = posted[key][0] if key in posted else 0
        posted[key] = (number + 1, num_bytes, label)
        return Message(verb, key[0], channel.key, lane, number, num_bytes, label)

    def post_to_group(
        self, function: Callable[..., Any], x: Tensor, peer: int, tag: int, message: Message
    ) -> Posted:
        """Call a process group's send or recv. Raises PeerLost if the connection is known to be broken."""
        try:
            return function([x], peer, tag), message, x
        except RuntimeError as error:
            raise self.lost(message, error) from None

    def wait(self, work: Any, message: Message | None) -> None:
        """Wait for a posted message. Raises PeerLate past the deadline, PeerLost if the connection broke."""
        assert message is not None
        thread = threading.get_ident()
        start_s = time.monotonic()
        self.waits[thread] = message
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if time.monotonic() - start_s >= 0.9 * self.timeout_s:
                raise self.late(message) from None
            raise self.lost(message, error) from None
        finally:
            self.waits.pop(thread, None)

    def late(self, message: Message) -> PeerLate:
        """Return the error of a message that has passed its deadline."""
        return PeerLate(f"rank {self.rank} waited {self.timeout_s:g} s to {message}", message.peer)

    def lost(self, message: Message, error: Exception) -> PeerLost:
        """Return the error of a message that could not be posted or that broke off."""
        return peer_lost(f"rank {self.rank} could not {message}", f"rank {message.peer}", error)

    def drain(self) -> None:
        """Wait until every operation of this rank has ended. Raises the first error that nobody has waited for."""
        untold = []
        for channel in list(self.channels.values()):
            if isinstance(channel.stream, ThreadStream):
                untold += channel.stream.drain()
        if untold:
            raise untold[0]

    def close(self) -> None:
        """Let go of the connections that the transport has made itself. Nothing may be sent afterwards."""

    # torch's process groups

    def process_group(self, key: ChannelId) -> Any:
        """Return the torch process group of these ranks, in this order. The first call creates it and is collective."""
        if key == ChannelId("world", self.ranks):
            return self.group
        if key not in self.groups:
            self.groups[key] = named_group(
                list(key.ranks), self.namespace + key.name, self.timeout_s, like=self.group
            )
        return self.groups[key]

    def release_groups(self) -> None:
        """Release the process groups before the interpreter ends; else a thread that frees a tensor aborts the process."""
        self.group = None
        self.groups.clear()

    # What a transport implements

    def make_stream(self, key: ChannelId) -> Stream:
        """Return the stream of a new channel."""
        raise NotImplementedError

    def prepare(self, channel: Channel) -> None:
        """Prepare a channel; all its ranks call this when they make it."""

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        """Post a send and a receive, each of which is None or not empty; return the work to wait for.

        paired  whether the caller asked for both, empty or not. It is equal on both ranks of a message
        """
        raise NotImplementedError

    def before_native(self, channel: Channel, x: Tensor) -> None:
        """Prepare for one of torch's own collectives of x; called by all ranks of the channel, on its stream."""


class PendingMessages:
    """Posted messages: `wait()` returns the received tensor once all of them have been sent and received."""

    def __init__(self, transport: Transport, posted: Sequence[Posted], out: Tensor | None):
        self._transport = transport
        self._posted = posted
        self._out = out

    def wait(self) -> Tensor | None:
        for work, message, _ in self._posted:
            self._transport.wait(work, message)
        self._posted = ()
        return self._out


class PostedLater:
    """Messages that the stream posts once the earlier operations have ended; the stream does not wait for them."""

    def __init__(self, posting: Pending):
        self._posting = posting

    def wait(self) -> Tensor | None:
        pending: PendingMessages = self._posting.wait()
        return pending.wait()


class Tagged(Transport):
    """The gloo transport. A message's tag is a digest of its run, name, ranks, operation, dtype, number and length.

    So a receive only matches a send of the same operation, dtype and length. A message of another length is never delivered
    (gloo would abort the process), nor is a message left over from an earlier run.
    """

    def make_stream(self, key: ChannelId) -> Stream:
        return ThreadStream(str(key), self.waits)

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        """Post the send before the receive: gloo then writes the message from its own thread, once the peer is ready.

        If the receive came first, the peer's message could arrive while this thread writes its own on the same connection,
        and gloo's thread would poll that connection in vain.
        """
        posted = []
        if send:
            x, to = send
            message, tag = self.describe(channel, "send", x, to)
            posted.append(self.post_to_group(self.group.send, x, channel.peers[to], tag, message))
        if receive:
            out, source = receive
            message, tag = self.describe(channel, "receive", out, source)
            posted.append(self.post_to_group(self.group.recv, out, channel.peers[source], tag, message))
        return posted

    def describe(self, channel: Channel, verb: str, x: Tensor, peer: int) -> tuple[Message, int]:
        """Count a message that is about to be posted; return its description and its tag."""
        label, label_bytes = channel.label(x.dtype)
        message = self.note(channel, verb, x.nbytes, peer, label)
        what = b"%s %d %d" % (label_bytes, message.number, x.nbytes)
        return message, zlib.crc32(what, channel.digest) >> 1  # a tag has 31 bits
