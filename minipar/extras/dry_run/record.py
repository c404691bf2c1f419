"""A rank's program, recorded as steps: its messages, collectives and waits, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

from minipar.comm.transport.checked import OF_ONE_SHAPE
from minipar.comm.transport.messages import ChannelId, Message


class Refused(ValueError):
    """A dry run cannot follow the program: it reads tensor values that only a real run has, or sends unseen messages."""


class Make(NamedTuple):
    """Make a channel."""

    channel: ChannelId

    def __str__(self) -> str:
        return f"make {self.channel}"


class Post(NamedTuple):
    """Post a send, a receive, or both as one group. At least one is not None; `number` counts the posts of a rank."""

    number: int
    send: Message | None
    receive: Message | None

    def __str__(self) -> str:
        return " and ".join(str(message) for message in (self.send, self.receive) if message is not None)


class Completed(NamedTuple):
    """Wait for the messages of the post with this number."""

    post: int

    def __str__(self) -> str:
        return "wait"


class Start(NamedTuple):
    """Submit an operation, given by its number, to the stream of its channel."""

    operation: int

    def __str__(self) -> str:
        return "go on"


class Finished(NamedTuple):
    """Wait until an operation has ended."""

    operation: int

    def __str__(self) -> str:
        return "wait"


Step = Make | Post | Completed | Start | Finished


@dataclass
class Recorded:
    """An operation of a stream: its steps and, if it is a collective, its signature and shape.

    signature  the collective and its reduction, such as "all_reduce sum"; "" for a point-to-point message
    shape      the shape of the tensor
    """

    channel: ChannelId
    steps: list[Step] = field(default_factory=list)
    signature: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def words(self) -> str:
        """The description on which all members of the channel must agree; "" for a point-to-point message."""
        return in_words(self.signature, self.shape)


def in_words(signature: str, shape: tuple[int, ...] | None) -> str:
    """Describe a collective: "all_reduce sum of [8]", or without the shape if ranks may have different shapes."""
    if shape is None or signature.split(" ")[0] not in OF_ONE_SHAPE:
        return signature
    return f"{signature} of {list(shape)}"


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
    num_posts: int = 0
    ended: bool = False

    def steps(self) -> Iterator[Step]:
        """Yield all steps, those of the main program first."""
        return chain(self.main, *(operation.steps for operation in self.operations))

    def messages(self) -> Iterator[Message]:
        """Yield the messages that this rank sends, in the order in which it posts them."""
        posts = (step for step in self.steps() if isinstance(step, Post))
        for post in sorted(posts, key=lambda post: post.number):
            if post.send is not None:
                yield post.send


def difference(first: Program, other: Program) -> str:
    """Describe the first difference of two records; "" if only their ranks differ."""
    for number, (a, b) in enumerate(zip_longest(first.operations, other.operations), start=1):
        if _called(a) != _called(b):
            return f"operation {number} is {_called(a)} on one and {_called(b)} on the other"
    pairs = [(first.main, other.main)]
    pairs += [(a.steps, b.steps) for a, b in zip(first.operations, other.operations)]
    for steps in pairs:
        for number, (one, two) in enumerate(zip_longest(*steps, fillvalue="do nothing"), start=1):
            # Compare the types, too: as tuples, a Start and a Finished with the same number are equal.
            if type(one) is not type(two) or one != two:
                return f"step {number} is to {one} on one and to {two} on the other"
    return "one ended and the other did not" if first.ended != other.ended else ""


def _called(operation: Recorded | None) -> str:
    return "nothing" if operation is None else f"{operation.words or 'a message'} on {operation.channel}"
