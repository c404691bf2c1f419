"""The transport under every Comm: posts messages, waits for them with a deadline, and counts the bytes sent.

There are two implementations of one interface: `Tagged` for gloo, which matches messages by pair of ranks and tag and
may post them from any thread; and `Grouped` (grouped.py) for NCCL, which matches them by order alone.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from minipar.comm.messages import Channel, ChannelId, Message, MessageCounts, PeerLate, PeerLost, Traffic
from minipar.comm.native import named_group
from minipar.comm.stream import ThreadStream, Waits
from minipar.trace import Trace


class Transport:
    """One process's endpoint in a world, shared by all its Comms.

    group      the torch process group that carries the messages
    ranks      the members of `group` as world ranks
    rank       this process's world rank
    timeout_s  seconds a single wait may take
    run        number of the run or world, part of every tag, so that no run receives messages of another
    node_size  ranks per machine, where the launcher knows it
    report     None, or a function that passes a value to the caller of `run`
    groups     (name, ranks) -> process group, for native collectives and the NCCL transport
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
        self._timeout = timedelta(seconds=timeout_s)

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        key = ChannelId(name, ranks)
        if key not in self.channels:
            digest = zlib.crc32(repr((self.run, name, ranks)).encode())
            peers = tuple(map(self.ranks.index, ranks))
            self.channels[key] = Channel(key, peers, digest, self.make_stream(str(key)), self.device)
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
        if key.ranks == self.ranks:
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

    def counts(self) -> MessageCounts:
        """Return what this rank has posted and what it waits for. All ranks' counts together explain a failure."""
        counts = MessageCounts(list(self.waits.values()), {}, {})
        for channel in list(self.channels.values()):
            for table, posted in ((counts.sent, channel.sent), (counts.received, channel.received)):
                for (peer, lane), last in list(posted.items()):
                    table[channel.key, lane, peer] = last
        return counts

    # The interface that a transport implements --------------------------------------------------------------------

    def make_stream(self, name: str):
        """Return the stream of a new channel."""
        raise NotImplementedError

    def prepare_channel(self, channel: Channel) -> None:
        """Prepare a channel; called by all its ranks when they make a Comm on it."""

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        """Post a send of x to rank `to` and a receive into `out` from rank `source`; `to` or `source` may be None."""
        raise NotImplementedError


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


class Tagged(Transport):
    """The gloo transport. A message's tag is a digest of its run, name, ranks, operation, dtype, number and length.

    So a receive only matches a send of the same operation, dtype and length. A message of another length is never delivered
    (gloo would abort the process), nor is a message left over from an earlier run.
    """

    def make_stream(self, name: str) -> ThreadStream:
        return ThreadStream(name, self.waits)

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        """Post the send before the receive: gloo then writes the message from its own thread, once the peer is ready.

        With the receive posted first, the peer's message could arrive while this thread writes its own on the same
        connection, and gloo's thread would poll that connection in vain.
        """
        works = []
        if to is not None and x.numel():
            x = x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x
            works.append(self._post_one(channel, "send", x, to))
            traffic.book(channel.kind or kind, x.nbytes)
        if source is not None and out.numel():
            works.append(self._post_one(channel, "receive", out, source))
        return PendingMessages(self, works, out)

    def _post_one(self, channel: Channel, verb: str, x: torch.Tensor, peer: int) -> tuple:
        # Messages of collectives and point-to-point messages are numbered separately: both may be pending at once.
        lane = "p2p" if channel.kind is None else "collective"
        posted, transport = (
            (channel.sent, self.group.send) if verb == "send" else (channel.received, self.group.recv)
        )
        key, num_bytes, (label, label_bytes) = (
            (channel.key.ranks[peer], lane),
            x.nbytes,
            channel.label(x.dtype),
        )
        number = posted[key][0] if key in posted else 0
        posted[key] = (number + 1, num_bytes, label)
        message = Message(verb, key[0], channel.key, lane, number, num_bytes, label)
        tag = zlib.crc32(b"%s %d %d" % (label_bytes, number, num_bytes), channel.digest) >> 1  # 31 bits
        try:
            work = transport([x], channel.peers[peer], tag)
        except RuntimeError as error:  # gloo already knows that the connection is broken
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None
        return work, message, x
