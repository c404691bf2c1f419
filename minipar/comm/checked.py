"""The grouped transport on gloo, with a checker: what NCCL would hang on or deliver to the wrong receive is refused.

A Comm has its own process group, as with NCCL, its messages are matched by order alone, and its stream does one thing
after another. Beside that, ranks say to each other what they are about to do, so that they find out before they do it:

    a channel    each member tells every other member which one it makes
    a message    a header goes before it: operation, shape, dtype, bytes and numbers, as the receiver expects them
    a native     each member tells the next one which collective it is in
    collective

What differs raises OutOfOrder, with both ranks and both sides. A rank that nobody answers waits for a header, with a
deadline; the counts of all ranks then say who waits for whom (`diagnosis.py`).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import torch

from minipar.comm.grouped import Grouped
from minipar.comm.messages import Channel, ChannelId, Message, OutOfOrder
from minipar.comm.stream import StreamThread, ThreadStream

HEADER_BYTES = 256
OF_ONE_SHAPE = ("all_reduce", "reduce", "broadcast")  # collectives whose tensor has one shape on all ranks
ORDER_TAG = 0x6F726472  # on the world's own group, whose owner may send on it too


class CheckedGrouped(Grouped):
    """Transport that keeps NCCL's rules on gloo. It sends a header of HEADER_BYTES per message, which is not counted."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        key = ChannelId("order of groups", self.ranks)
        peers = tuple(range(len(self.ranks)))
        self._order = self.channels[key] = Channel(key, peers, 0, None, self.device)
        self._broken: dict[ChannelId, Exception] = {}  # no communicator can be used after an error
        self._maker: threading.Thread | None = None  # the thread that makes channels

    def make_stream(self, key: ChannelId) -> ThreadStream:
        return ThreadStream(str(key), self.waits)

    # Channels -----------------------------------------------------------------------------------------------------

    def prepare(self, channel: Channel) -> None:
        ranks = channel.key.ranks
        if len(ranks) > 1:
            what = f"{channel.key} of ranks {ranks}"
            self._check_maker(what)
            self._agree(what, [peer for peer, rank in zip(channel.peers, ranks) if rank != self.rank])
            self.process_group(channel.key)

    def _check_maker(self, what: str) -> None:
        """Raise OutOfOrder unless all channels are made by one thread, outside the streams: it alone knows the order."""
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
        """Tell these ranks of the world's group what is made here; raise OutOfOrder if one of them makes another."""
        label = f"make {what}"
        asked = [self.note(self._order, "receive", HEADER_BYTES, peer, label) for peer in peers]
        posted = [
            self._post_header(
                self.group, peer, what, ORDER_TAG, self.note(self._order, "send", HEADER_BYTES, peer, label)
            )
            for peer in peers
        ]
        received = [
            self._receive_header(self.group, peer, what, ORDER_TAG, message)
            for peer, message in zip(peers, asked)
        ]
        for header, work, message in received:
            self.wait(work, message)
            if not header.matches():
                raise OutOfOrder(
                    f"rank {self.rank} makes {what}, where rank {message.peer} makes {header.theirs()}; all ranks must "
                    "make the groups that they share in one order, or NCCL waits for ever"
                )
        for work, message, _ in posted:
            self.wait(work, message)

    # Messages -----------------------------------------------------------------------------------------------------

    def start(self, channel: Channel, x, to, out, source) -> Sequence[tuple]:
        if channel.key in self._broken:
            raise self._broken[channel.key]
        try:
            self._refuse_empty(channel, x, to, out, source)
            self._run(channel, x, to, out, source)
        except Exception as error:
            self._broken[channel.key] = error
            raise
        return ()

    def _run(self, channel: Channel, x, to, out, source) -> None:
        group, works = self.process_group(channel.key), []
        if x is not None:
            message = self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
            works.append(self._post_header(group, to, _describe(channel, message), 0, message))
            works.append(self.hand_over(group.send, x, to, 0, message))
        if out is not None:
            message = self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
            self._require_header(channel, group, source, message)
            works.append(self.hand_over(group.recv, out, source, 0, message))
        for work, message, _ in works:
            self.wait(work, message)

    def before_native(self, channel: Channel, x: torch.Tensor) -> None:
        """Tell the next rank of the channel which of torch's collectives this is, and hear it from the one before."""
        size, group = len(channel.key.ranks), self.process_group(channel.key)
        if size > 1:
            me, label = channel.key.ranks.index(self.rank), channel.label(x.dtype)[0]
            sent = self.note(channel, "send", 0, (me + 1) % size, label)
            posted = self._post_header(group, (me + 1) % size, _describe(channel, sent), 0, sent)
            received = self.note(channel, "receive", 0, (me - 1) % size, label)
            self._require_header(channel, group, (me - 1) % size, received)
            self.wait(*posted[:2])

    def _refuse_empty(self, channel: Channel, x, to, out, source) -> None:
        for verb, tensor, peer in (("send to", x, to), ("receive from", out, source)):
            if tensor is not None and not tensor.numel():
                raise OutOfOrder(
                    f"rank {self.rank} posts an empty {verb} rank {channel.key.ranks[peer]} on {channel.key} "
                    f"({_operation(channel)}): NCCL sends no message of 0 bytes, and a peer that posts the other half may "
                    "hang; leave it out on both sides"
                )

    def _require_header(self, channel: Channel, group, source: int, message: Message) -> None:
        mine = _describe(channel, message)
        header, work, _ = self._receive_header(group, source, mine, 0, message)
        self.wait(work, message)
        if not header.matches():
            raise OutOfOrder(
                f"rank {self.rank} expects from rank {message.peer} on {channel.key}: {mine}; rank {message.peer} sends: "
                f"{header.theirs()}. NCCL matches messages by order alone: it would hang, or deliver this one"
            )

    # Headers ------------------------------------------------------------------------------------------------------

    def _post_header(self, group, peer: int, words: str, tag: int, message: Message) -> tuple:
        return self.hand_over(group.send, Header(words).tensor, peer, tag, message)

    def _receive_header(self, group, peer: int, words: str, tag: int, message: Message) -> tuple:
        header = Header("", words)
        work, *_ = self.hand_over(group.recv, header.tensor, peer, tag, message)
        return header, work, message


class Header:
    """A sentence in HEADER_BYTES bytes: a checksum of all of it, and as much of it as there is room for.

    tensor    holds the sentence `words`, or receives one
    expected  the sentence that the received one should be
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
    shape = f" of {list(channel.shape)}" if channel.kind in OF_ONE_SHAPE else ""
    return f"collective {channel.num_collectives}, {channel.signature}{shape}"


def _describe(channel: Channel, message: Message) -> str:
    """Describe a message in words that are the same at its sender and its receiver."""
    dtype = message.label.rsplit(" ", 1)[-1]
    return (
        f"{_operation(channel)}, message {message.number} of this pair, {message.num_bytes} bytes of {dtype}"
    )
