"""The grouped transport on gloo, with a checker: it raises where NCCL would hang, or match a message to a wrong receive.

As with NCCL, a Comm has its own process group, its messages are matched by order alone, and its stream runs one operation
after another. In addition, ranks tell each other what they are about to do, so that a mismatch is found in advance:

    a channel    each member tells every other member which one it makes
    a message    is preceded by a header with its operation, shape, dtype, bytes and numbers, which the receiver compares
                 with its own
    a native     each member tells the next one which collective it is in
    collective

A mismatch raises OutOfOrder, which names both ranks and what each is doing. If no header arrives, the wait for it passes
its deadline; the message counts of all ranks then tell which rank waits for which (`diagnosis.py`).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minipar.comm.transport.errors import OutOfOrder
from minipar.comm.transport.grouped import Grouped
from minipar.comm.transport.messages import Channel, ChannelId, Half, Message
from minipar.comm.transport.stream import Stream, StreamThread, ThreadStream
from minipar.comm.transport.transport import Posted

HEADER_BYTES = 256
# Collectives whose tensor has the same shape on all ranks.
OF_ONE_SHAPE = ("all_reduce", "reduce", "broadcast")
ORDER_TAG = 0x6F726472  # a tag of its own, since the caller may also send messages on the world's group


class CheckedGrouped(Grouped):
    """Transport that enforces NCCL's rules on gloo. It sends a header of HEADER_BYTES per message, which is not counted."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        key = ChannelId("order of groups", self.ranks)
        peers = tuple(range(len(self.ranks)))
        self._order = self.channels[key] = Channel(key, peers, 0, self.make_stream(key), self.device)
        self._broken: dict[ChannelId, Exception] = {}  # channel -> the error that ended its use
        self._maker: threading.Thread | None = None  # the thread that makes channels

    def make_stream(self, key: ChannelId) -> Stream:
        return ThreadStream(str(key), self.waits)

    # Channels

    def prepare(self, channel: Channel) -> None:
        ranks = channel.key.ranks
        if len(ranks) > 1:
            what = f"{channel.key} of ranks {ranks}"
            self._check_maker(what)
            self._agree(what, [peer for peer, rank in zip(channel.peers, ranks) if rank != self.rank])
            self.process_group(channel.key)

    def _check_maker(self, what: str) -> None:
        """Raise OutOfOrder unless one thread, outside the streams, makes all channels: only then is their order fixed."""
        here = threading.current_thread()
        if self._maker is None and not isinstance(here, StreamThread):
            self._maker = here
        if here is not self._maker:
            maker = "another thread" if self._maker is None else f"thread {self._maker.name!r}"
            raise OutOfOrder(
                f"rank {self.rank} makes {what} in thread {here.name!r}, which may be another moment on every rank; make "
                f"it in {maker}, like the others, before the operation that uses it"
            )

    def _agree(self, what: str, peers: list[int]) -> None:
        """Tell `peers`, ranks of the world's group, which channel is made here. OutOfOrder if a peer makes another one."""
        label = f"make {what}"
        asked = [self.note(self._order, "receive", HEADER_BYTES, peer, label) for peer in peers]
        posted = []
        for peer in peers:
            message = self.note(self._order, "send", HEADER_BYTES, peer, label)
            posted.append(self._post_header(self.group, peer, what, ORDER_TAG, message))
        expected = [
            self._receive_header(self.group, peer, what, ORDER_TAG, message)
            for peer, message in zip(peers, asked)
        ]
        for header, work, message in expected:
            self.wait(work, message)
            if not header.matches():
                raise OutOfOrder(
                    f"rank {self.rank} makes {what}, where rank {message.peer} makes {header.theirs()}; all ranks must "
                    "make the groups that they share in one order, or NCCL waits for ever"
                )
        for work, of, _ in posted:
            self.wait(work, of)

    # Messages

    def start(
        self, channel: Channel, send: Half | None, receive: Half | None, paired: bool
    ) -> Sequence[Posted]:
        if channel.key in self._broken:
            raise self._broken[channel.key]
        try:
            self._refuse_empty(channel, send, receive)
            self._run(channel, send, receive)
        except Exception as error:
            self._broken[channel.key] = error
            raise
        return ()

    def _run(self, channel: Channel, send: Half | None, receive: Half | None) -> None:
        group = self.process_group(channel.key)
        posted = []
        if send:
            x, to = send
            message = self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
            posted.append(self._post_header(group, to, _describe(channel, message), 0, message))
            posted.append(self.post_to_group(group.send, x, to, 0, message))
        if receive:
            out, source = receive
            message = self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
            self._require_header(channel, group, source, message)
            posted.append(self.post_to_group(group.recv, out, source, 0, message))
        for work, of, _ in posted:
            self.wait(work, of)

    def before_native(self, channel: Channel, x: torch.Tensor) -> None:
        """Tell the channel's next rank which of torch's collectives this is, and check the previous rank's."""
        size = len(channel.key.ranks)
        if size == 1:
            return
        group = self.process_group(channel.key)
        me = channel.key.ranks.index(self.rank)
        after, before = (me + 1) % size, (me - 1) % size
        label = channel.label(x.dtype)[0]
        sent = self.note(channel, "send", 0, after, label)
        work, of, _ = self._post_header(group, after, _describe(channel, sent), 0, sent)
        received = self.note(channel, "receive", 0, before, label)
        self._require_header(channel, group, before, received)
        self.wait(work, of)

    def _refuse_empty(self, channel: Channel, send: Half | None, receive: Half | None) -> None:
        for verb, half in (("send to", send), ("receive from", receive)):
            if half and not half[0].numel():
                raise OutOfOrder(
                    f"rank {self.rank} posts an empty {verb} rank {channel.key.ranks[half[1]]} on {channel.key} "
                    f"({_operation(channel)}): NCCL sends no message of 0 bytes, and a peer that posts the other half may "
                    "hang; leave it out on both sides"
                )

    def _require_header(self, channel: Channel, group: Any, source: int, message: Message) -> None:
        mine = _describe(channel, message)
        header, work, _ = self._receive_header(group, source, mine, 0, message)
        self.wait(work, message)
        if not header.matches():
            raise OutOfOrder(
                f"rank {self.rank} expects from rank {message.peer} on {channel.key}: {mine}; rank {message.peer} sends: "
                f"{header.theirs()}. NCCL matches messages by order alone: it would hang, or deliver this one"
            )

    # Headers

    def _post_header(self, group: Any, peer: int, words: str, tag: int, message: Message) -> Posted:
        return self.post_to_group(group.send, Header(words).tensor, peer, tag, message)

    def _receive_header(self, group: Any, peer: int, words: str, tag: int, message: Message) -> Expected:
        header = Header("", words)
        work, *_ = self.post_to_group(group.recv, header.tensor, peer, tag, message)
        return Expected(header, work, message)


class Expected(NamedTuple):
    """A header that is being received, and the message that it precedes."""

    header: Header
    work: Any
    message: Message


class Header:
    """A message of HEADER_BYTES bytes for a sentence: the whole sentence's checksum, and as much of its text as fits.

    tensor    the bytes: of the sentence `words`, or still to be received
    expected  the sentence that should be received
    """

    def __init__(self, words: str, expected: str = ""):
        self._memory, self._expected = bytearray(_packed(words)), _packed(expected)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def matches(self) -> bool:
        return self._memory == self._expected

    def theirs(self) -> str:
        return bytes(self._memory[4:]).rstrip(b"\0").decode(errors="replace")


def _packed(words: str) -> bytes:
    data = words.encode()
    return zlib.crc32(data).to_bytes(4, "big") + data[: HEADER_BYTES - 4].ljust(HEADER_BYTES - 4, b"\0")


def _operation(channel: Channel) -> str:
    if channel.kind is None:
        return "point to point"
    shape = f" of {list(channel.shape)}" if channel.shape is not None and channel.kind in OF_ONE_SHAPE else ""
    return f"collective {channel.num_collectives}, {channel.signature}{shape}"


def _describe(channel: Channel, message: Message) -> str:
    """Describe a message in words that are the same at its sender and its receiver."""
    dtype = message.label.rsplit(" ", 1)[-1]
    return (
        f"{_operation(channel)}, message {message.number} of this pair, {message.num_bytes} bytes of {dtype}"
    )
