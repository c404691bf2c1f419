"""The transport under every Comm: it hands messages over, waits for them with a deadline, and keeps the ledger of bytes.

There are two, with one contract: `Tagged`, for gloo, which matches messages by pair of ranks and tag, posted from any
thread; and `Grouped` (grouped.py), for NCCL, which matches them by their order alone.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from minipar.comm.messages import Channel, ChannelId, Message, MessageCounts, PeerLost, Traffic
from minipar.comm.native import named_group
from minipar.comm.stream import ThreadStream, Waits
from minipar.trace import Trace


class Transport:
    """One process's end of the world, shared by all its Comms.

    group      the torch process group underneath, `ranks` its members as world ranks, `rank` this one of them
    timeout_s  how long one wait may take
    run        number of the run of a local pool: part of every tag, so that runs never meet
    node_size  ranks per machine, where the launcher knows it
    report     None, or a function that hands a value to the caller of `run`
    groups     (name, ranks) -> process group, for native collectives and the grouped transport
    namespace  what the names of these groups begin with
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
        """How many of these ranks each node has, if known, uniform, in blocks, and there are two levels; else None."""
        if self.node_size is None:
            return None
        nodes = [r // self.node_size for r in ranks]
        g = nodes.count(nodes[0])
        blocks = [node for node in dict.fromkeys(nodes) for _ in range(g)]
        return g if nodes == blocks and 1 < g < len(ranks) else None

    def process_group(self, key: ChannelId):
        """The torch process group of exactly these ranks, in this order; the first call makes it, on all of them."""
        if key.ranks == self.ranks:
            return self.group
        if key not in self.groups:
            self.groups[key] = named_group(list(key.ranks), self.namespace + key.name, self.timeout_s)
        return self.groups[key]

    def release_groups(self) -> None:
        """Destroy the process groups before the interpreter ends, or a thread that frees a tensor aborts the process."""
        self.group = None
        self.groups.clear()

    def wait(self, work, message: Message) -> None:
        """Wait for a posted message until the deadline. Raises TimeoutError, or PeerLost where the connection broke."""
        thread, start_s = threading.get_ident(), time.monotonic()
        self.waits[thread] = message
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if time.monotonic() - start_s >= 0.9 * self.timeout_s:
                raise TimeoutError(f"rank {self.rank} waited {self.timeout_s:g} s to {message}") from None
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None
        finally:
            self.waits.pop(thread, None)

    def counts(self) -> MessageCounts:
        """Everything sent, received and waited for here: enough to explain a failure from all ranks' counts."""
        counts = MessageCounts(list(self.waits.values()), {}, {})
        for channel in list(self.channels.values()):
            for table, posted in ((counts.sent, channel.sent), (counts.received, channel.received)):
                for (peer, lane), last in list(posted.items()):
                    table[channel.key, lane, peer] = last
        return counts

    # The contract: what a transport implements --------------------------------------------------------------------

    def make_stream(self, name: str):
        """The stream of a new channel."""
        raise NotImplementedError

    def open(self, channel: Channel) -> None:
        """A Comm was made on this channel, by all its ranks."""

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        """Hand over a send of x to rank `to` and a receive into `out` from rank `source`; either may be None."""
        raise NotImplementedError


class PendingMessages:
    """Messages handed to the transport: `wait()` returns what was received, when all have arrived or left."""

    def __init__(self, transport: Transport, works: Sequence[tuple], out: torch.Tensor | None):
        self._transport = transport
        self._works = works  # (work, message, tensor): the tensor must live until its message has left
        self._out = out

    def wait(self) -> torch.Tensor | None:
        for work, message, _ in self._works:
            self._transport.wait(work, message)
        self._works = ()
        return self._out


class Tagged(Transport):
    """Messages of gloo. The tag is a digest of run, name, ranks, operation, dtype, number and length of the message.

    So a message can only be received as what it was sent as. One of another length is never delivered (it would abort
    the process), and one left over from an earlier run is never found.
    """

    def make_stream(self, name: str) -> ThreadStream:
        return ThreadStream(name, self.waits)

    def post(self, channel: Channel, kind: str, x, to, out, source, traffic: Traffic) -> PendingMessages:
        """The send first: gloo then writes the message from its own thread, once the peer is ready for it.

        A receive posted first has the peer's message arrive while this thread is writing its own on the same
        connection, for which gloo's thread then polls in vain.
        """
        works = []
        if to is not None and x.numel():
            x = x.detach().contiguous() if x.requires_grad or not x.is_contiguous() else x
            works.append(self._hand_over(channel, "send", x, to))
            traffic.book(channel.kind or kind, x.nbytes)
        if source is not None and out.numel():
            works.append(self._hand_over(channel, "receive", out, source))
        return PendingMessages(self, works, out)

    def _hand_over(self, channel: Channel, verb: str, x: torch.Tensor, peer: int) -> tuple:
        # A collective on the stream's thread and a message posted beside it are counted apart.
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
        except RuntimeError as error:  # a connection that is known to be broken
            raise PeerLost(f"rank {self.rank} could not {message}: {error}") from None
        return work, message, x
