"""A transport that records what a rank would send, and sends nothing: a receive returns at once.

Every rank runs its own program in a thread of this process, one at a time (`turns.py`). Floating-point tensors have no
values here (`tensors.py`), so messages of them are not delivered. A message of integers, such as the shape of the next
message, is delivered, because the receiver's program depends on it; a rank waits only for such messages.

A message to or from a rank in whose place another is run is counted, and not recorded.

A rank's program is recorded as steps and collectives (`record.py`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from minipar.comm import Comm
from minipar.comm.transport.checked import OF_ONE_SHAPE
from minipar.comm.transport.messages import Channel, ChannelId, Message
from minipar.comm.transport.stream import Handle, OnWait, Operation, Stream
from minipar.comm.transport.traffic import Traffic
from minipar.comm.transport.transport import Transport
from minipar.extras.dry_run.record import Completed, Key, Post, Program, Refused, key_of
from minipar.extras.dry_run.tensors import DryTensors


class Contents:
    """The messages that the ranks have sent: key -> the tensor, or None if it has no values.

    first       the rank that is run in place of each rank
    wait_until  returns once its argument, a function, returns True; meanwhile the other ranks run
    gathered    (channel, number of an all-gather) -> rank -> the integers that it passed
    """

    def __init__(self, first: Sequence[int], wait_until: Callable[[Callable[[], bool]], None]):
        self.first, self.wait_until = first, wait_until
        self.gathered: dict[tuple[ChannelId, int], dict[int, list[Any]]] = defaultdict(dict)
        self.sent: dict[Key, Tensor | None] = {}

    def runs(self, rank: int) -> bool:
        return self.first[rank] == rank

    def take(self, key: Key) -> Tensor | None:
        self.wait_until(lambda: key in self.sent)
        return self.sent.pop(key)


class RecordedTransport(Transport):
    """The transport of one rank of a dry run. Its program grows as the rank runs."""

    def __init__(self, ranks: tuple[int, ...], rank: int, contents: Contents, tensors: DryTensors):
        super().__init__(None, ranks, rank, torch.device("cpu"), timeout_s=60.0)
        self.program = Program(rank)
        self.contents, self.tensors = contents, tensors
        self.running: list[ChannelId] = []  # of the operations that run, the innermost last
        self.recording = True
        self._thread = threading.get_ident()

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        key = ChannelId(name, ranks)
        if key not in self.channels:
            self.channels[key] = RecordedChannel(self, key)
        return self.channels[key]

    def make_stream(self, key: ChannelId) -> Stream:
        return RecordedStream(self, key)

    def post(
        self, channel: Channel, kind: str, x: Tensor | None, to: int | None, out: Tensor | None, source: int | None,
        traffic: Traffic,
    ) -> Any:  # fmt: skip
        send = receive = None
        if to is not None and x is not None and x.numel():
            traffic.book(channel.kind or kind, x.nbytes)
            if self.contents.runs(channel.key.ranks[to]):
                send = self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
                value = None
                if self.tensors.has_contents(x):
                    # Copy it, since x may change before the receiver runs. Without modes, so as not to count it as memory.
                    with _disable_current_modes():
                        value = x.detach().clone()
                self.contents.sent[key_of(self.rank, send)] = value
        if source is not None and out is not None and out.numel():
            if self.contents.runs(channel.key.ranks[source]):
                receive = self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
            elif not out.is_meta:
                self.tensors.forget_contents(out)
        number = self.program.num_posts
        self.program.num_posts += 1
        self.record(Post(number, send, receive))
        return RecordedMessages(self, number, receive, out)

    def process_group(self, key: ChannelId) -> Any:
        raise Refused(
            "algorithm=native sends by torch's own collectives, whose messages a dry run cannot see; use auto or another"
        )

    def record(self, step: Post | Completed) -> None:
        """Add a step to the program. Steps of another thread are left out: it only waits in order to free memory."""
        if self.recording and threading.get_ident() == self._thread:
            self.program.steps.append(step)

    def receive_contents(self, message: Message, out: Tensor) -> None:
        """Wait until the sender has posted a message, and copy its contents into `out`."""
        value = self.contents.take(key_of(self.rank, message))
        if value is None:
            self.tensors.forget_contents(out)
        elif value.nbytes == out.nbytes:
            out.copy_(value.view(out.dtype).view(out.shape))


class RecordedMessages:
    """Posted messages of a dry run. It keeps no reference to the tensor that is sent."""

    def __init__(self, transport: RecordedTransport, post: int, receive: Message | None, out: Tensor | None):
        self._transport, self._post, self._receive, self._out = transport, post, receive, out

    def wait(self) -> Tensor | None:
        out, self._out = self._out, None
        self._transport.record(Completed(self._post))
        if self._receive is not None and out is not None and not out.is_meta:
            self._transport.receive_contents(self._receive, out)
        self._receive = None
        return out


class RecordedStream:
    """A stream that runs every operation immediately in the caller's thread."""

    def __init__(self, transport: RecordedTransport, key: ChannelId):
        self._transport, self._key = transport, key

    def inside(self) -> bool:
        return self._key in self._transport.running

    def idle(self) -> bool:
        return False

    def run(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Any:
        return operation() if self.inside() else self.submit(operation).wait()

    def submit(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Handle:
        running = self._transport.running
        running.append(self._key)
        try:
            return Handle.finished_with(operation())
        finally:
            running.pop()

    def lane(self) -> str:
        return "main"


class RecordedChannel(Channel):
    """A channel that records each collective that begins on it. Its scratch buffers for floats are on the meta device."""

    def __init__(self, transport: RecordedTransport, key: ChannelId):
        self._transport = transport
        super().__init__(key, key.ranks, 0, transport.make_stream(key), transport.device)

    @property
    def num_collectives(self) -> int:
        return self._num_collectives

    @num_collectives.setter
    def num_collectives(self, number: int) -> None:
        self._num_collectives = number
        if number:  # `kind`, `signature` and `shape` are set before the number
            shape = f" of {list(self.shape)}" if self.shape is not None and self.kind in OF_ONE_SHAPE else ""
            self._transport.program.collectives[self.key].append(self.signature + shape)

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str) -> Tensor:
        if not dtype.is_floating_point:
            return super().scratch(num_elems, dtype, use)
        use = f"{use} of floats"  # memory of its own, which that for integers does not replace
        view = self._views.get(use)
        if view is None or view.numel() < num_elems or view.dtype != dtype:
            self._views[use] = torch.empty(num_elems, dtype=dtype, device="meta")
        return self._views[use][:num_elems]


class RecordedComm(Comm):
    """A Comm that gathers integers also if another rank is run in a member's place: that rank's integers.

    It is a member, too: of two ranks of a kind, the first differs only in coordinates along which the Comm's ranks differ.
    """

    def _collective(self, kind: str, algorithm: str, async_op: bool, x: Tensor, **kwargs: Any) -> Any:
        result = super()._collective(kind, algorithm, async_op, x, **kwargs)
        transport = self._transport
        assert isinstance(transport, RecordedTransport)
        contents = transport.contents
        first = [contents.first[rank] for rank in self.ranks]
        if kind != "all_gather" or not transport.tensors.has_contents(x) or first == list(self.ranks):
            return result
        gathered = contents.gathered[self._channel.key, self._channel.num_collectives]
        gathered[self.ranks[self.rank]] = (
            x.tolist()
        )  # a list: a tensor would be counted as this rank's memory
        contents.wait_until(lambda: gathered.keys() >= set(first))
        return torch.tensor(list(chain.from_iterable(gathered[rank] for rank in first)), dtype=x.dtype)
