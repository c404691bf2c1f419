"""A rank's program, recorded as steps: its messages, collectives and waits, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from minipar.comm.transport.messages import ChannelId, Message


class Refused(ValueError):
    """A dry run cannot follow the program: it reads tensor values that only a real run has, or sends unseen messages."""


class Unknown(Refused):
    """The program reads a tensor without values."""


class Make(NamedTuple):
    """Make a channel."""

    channel: ChannelId

    def __str__(self) -> str:
        return f"make {self.channel}"


class Post(NamedTuple):
    """Post a send, a receive, or both as one group. At least one is not None. A rank's posts are all different."""

    send: Message | None
    receive: Message | None

    def __str__(self) -> str:
        return " and ".join(str(message) for message in self if message is not None)


class Start(NamedTuple):
    """Submit an operation, given by its number, to the stream of its channel."""

    operation: int

    def __str__(self) -> str:
        return "go on"


class Wait(NamedTuple):
    """Wait until a post's messages are delivered, or an operation, given by its number, has ended."""

    on: Post | int

    def __str__(self) -> str:
        return "wait"


Step = Make | Post | Start | Wait


@dataclass
class Recorded:
    """An operation of a stream: its steps, and what it is.

    words     the collective on which all members of the channel must agree, with its shape unless ranks may have different
              ones: "all_reduce sum of [8]"; "" for a point-to-point message
    call      in a dry run by kind, the collective with all its arguments (`call.py`)
    num_sent  the number of messages sent, if they are no longer among the steps
    """

    channel: ChannelId
    steps: list[Step] = field(default_factory=list)
    words: str = ""
    call: Any = None
    num_sent: int = 0


@dataclass
class Program:
    """The recorded program of a rank.

    main        the steps outside all operations
    operations  the operations that its streams run
    ended       False if the rank raised an error, or waited for integers that no rank sent
    """

    rank: int
    main: list[Step] = field(default_factory=list)
    operations: list[Recorded] = field(default_factory=list)
    ended: bool = False

    def steps(self) -> Iterator[Step]:
        """Yield all steps, those of the main program first."""
        return chain(self.main, *(operation.steps for operation in self.operations))

    def messages(self) -> Iterator[Message]:
        """Yield the messages that this rank sends, in the order in which it posts them."""
        return (step.send for step in self.steps() if isinstance(step, Post) and step.send is not None)


def difference(first: Program, other: Program) -> str:
    """Describe the first difference of two records; "" if only their ranks differ."""
    pairs = [(first.main, other.main)]
    for number, (a, b) in enumerate(zip_longest(first.operations, other.operations), start=1):
        if _called(a) != _called(b) or (a and b and a.call != b.call):
            return f"operation {number} is {_called(a)} on one and {_called(b)} on the other"
        pairs.append((a.steps, b.steps))
    for ones, twos in pairs:
        for number, (one, two) in enumerate(zip_longest(ones, twos, fillvalue="do nothing"), start=1):
            # Compare the types, too: as tuples, a Start and a Wait with the same number are equal.
            if type(one) is not type(two) or one != two:
                return f"step {number} is to {one} on one and to {two} on the other"
    return "one ended and the other did not" if first.ended != other.ended else ""


def _called(operation: Recorded | None) -> str:
    if operation is None:
        return "nothing"
    return f"{operation.call or operation.words or 'a message'} on {operation.channel}"
