"""A transport that records what a rank would send, and sends nothing: a receive returns at once.

Every rank runs its own program in a thread of this process, one at a time (`turns.py`). Floating-point tensors have no
values here (`tensors.py`), so messages of them are not delivered. A message of integers, such as the shape of the next
message, is delivered, because the receiver's program depends on it; a rank waits only for such messages.

A rank's program is recorded as steps (`record.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from minipar.comm.transport.messages import Channel, ChannelId, Message
from minipar.comm.transport.stream import OnWait, Operation
from minipar.comm.transport.traffic import Traffic
from minipar.comm.transport.transport import Transport
from minipar.extras.dry_run.record import Make, Post, Program, Recorded, Refused, Start, Step, Wait
from minipar.extras.dry_run.tensors import DryTensors
from minipar.extras.dry_run.turns import Turns

# A message's identity: its channel, lane, sender, receiver and number.
Key = tuple[ChannelId, str, int, int, int]


class Contents(Turns):
    """The messages that ranks have sent, which take turns: key -> the tensor, or None if it has no values.

    ranks       the ranks that are run; a message from any other one has no values
    kinds       the `Kinds` of the ranks, if only some of each kind are run; else None
    """

    def __init__(self, ranks: Container[int], kinds: Any):
        super().__init__()
        self.ranks, self.kinds = ranks, kinds
        self.sent: dict[Key, Tensor | None] = {}

    def take(self, message: Message, rank: int) -> Tensor | None:
        """Return what `rank` receives by this message, once it has been sent."""
        key = message.channel, message.lane, message.peer, rank, message.number
        if message.peer in self.ranks:
            self.wait_until(lambda: key in self.sent)
        return self.sent.pop(key, None)


class RecordedTransport(Transport):
    """The transport of one rank of a dry run. Its program grows as the rank runs."""

    def __init__(self, ranks: tuple[int, ...], program: Program, contents: Contents, tensors: DryTensors):
        super().__init__(None, ranks, program.rank, torch.device("cpu"), timeout_s=60.0)
        self.program, self.contents, self.tensors = program, contents, tensors
        self.running: list[Recorded] = []
        self.recording = True
        self._thread = threading.get_ident()

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        key = ChannelId(name, ranks)
        if key not in self.channels:
            self.channels[key] = RecordedChannel(key, ranks, 0, RecordedStream(self, key), self.device)
            self.record(Make(key))
        return self.channels[key]

    def post(
        self, channel: Channel, kind: str, x: Tensor | None, to: int | None, out: Tensor | None, source: int | None,
        traffic: Traffic,
    ) -> Any:  # fmt: skip
        send = receive = None
        if to is not None and x is not None and x.numel():
            send = self.note(channel, "send", x.nbytes, to, channel.label(x.dtype)[0])
            traffic.book(channel.kind or kind, x.nbytes)
            if send.peer in self.contents.ranks:
                key = send.channel, send.lane, self.rank, send.peer, send.number
                # Copy it, since x may change before the receiver runs. Without modes, so as not to count it as memory.
                with _disable_current_modes():
                    self.contents.sent[key] = x.detach().clone() if self.tensors.has_contents(x) else None
        if source is not None and out is not None and out.numel():
            receive = self.note(channel, "receive", out.nbytes, source, channel.label(out.dtype)[0])
        posted = Post(send, receive) if send or receive else None
        if posted:
            self.record(posted)
        return RecordedMessages(self, posted, out)

    def process_group(self, key: ChannelId) -> Any:
        raise Refused(
            "algorithm=native sends by torch's own collectives, whose messages a dry run cannot see; use auto or another"
        )

    def record(self, step: Step) -> None:
        """Add a step to the running operation, or to the rank's main program if none runs.

        Steps of another thread are left out: it only waits for messages in order to free their memory.
        """
        if self.recording and threading.get_ident() == self._thread:
            (self.running[-1].steps if self.running else self.program.main).append(step)

    def receive_contents(self, message: Message, out: Tensor) -> None:
        """Wait until the sender has posted a message, and copy its contents into `out`."""
        value = self.contents.take(message, self.rank)
        if value is None:
            self.tensors.forget_contents(out)
        elif value.nbytes == out.nbytes:
            out.copy_(value.view(out.dtype).view(out.shape))


class RecordedMessages:
    """Posted messages of a dry run. It keeps no reference to the tensor that is sent."""

    def __init__(self, transport: RecordedTransport, posted: Post | None, out: Tensor | None):
        self._transport, self._posted, self._out = transport, posted, out

    def wait(self) -> Tensor | None:
        posted, out = self._posted, self._out
        self._posted = self._out = None
        if posted:
            self._transport.record(Wait(posted))
            if posted.receive and out is not None and not out.is_meta:
                self._transport.receive_contents(posted.receive, out)
        return out


class RecordedStream:
    """A stream that runs every operation immediately in the caller's thread, and records its start and the waits for it."""

    def __init__(self, transport: RecordedTransport, key: ChannelId):
        self._transport, self._key = transport, key

    def inside(self) -> bool:
        return any(operation.channel is self._key for operation in self._transport.running)

    def idle(self) -> bool:
        return False  # so a message posted ahead is recorded as an operation for which the rank does not wait yet

    def run(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> Any:
        return operation() if self.inside() else self.submit(operation).wait()

    def submit(self, operation: Operation, on_wait: OnWait | None = None, what: str = "") -> RecordedHandle:
        of, program = self._transport, self._transport.program
        number = len(program.operations)
        of.record(Start(number))
        program.operations.append(Recorded(self._key))
        of.running.append(program.operations[-1])
        try:
            return RecordedHandle(of, number, operation())
        finally:
            of.running.pop()

    def lane(self) -> str:
        return "main"


class RecordedHandle:
    """The handle of a recorded operation. The operation has already run; a wait for it is recorded as a step."""

    def __init__(self, transport: RecordedTransport, number: int, result: Any):
        self._transport, self._number, self._result = transport, number, result

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        self._transport.record(Wait(self._number))
        return self._result


class RecordedChannel(Channel):
    """A channel whose scratch memory for floats has no values."""

    def scratch(self, num_elems: int, dtype: torch.dtype, use: str) -> Tensor:
        if dtype.is_floating_point:
            use = f"{use} of floats"
            memory = self._memory.get(use)
            if memory is None or memory.nbytes < num_elems * dtype.itemsize:
                self._memory[use] = torch.empty(num_elems, dtype=dtype).view(torch.uint8)
        return super().scratch(num_elems, dtype, use)
