"""A rank's program, recorded as steps: its messages, collectives and waits, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from minipar.comm.transport.messages import ChannelId, Message


class Refused(ValueError):
    """A dry run cannot follow the program: it reads tensor values that only a real run has, or sends unseen messages."""


# A message's identity: its channel, lane, sender, receiver and number.
Key = tuple[ChannelId, str, int, int, int]


def key_of(rank: int, message: Message) -> Key:
    """Return the identity of a message that a rank sends or receives."""
    pair = (rank, message.peer) if message.verb == "send" else (message.peer, rank)
    return message.channel, message.lane, *pair, message.number


class Make(NamedTuple):
    """Make a channel."""

    channel: ChannelId


class Post(NamedTuple):
    """Post a send, a receive, or both as one group. At least one is not None; `number` counts the posts of a rank."""

    number: int
    send: Message | None
    receive: Message | None


class Completed(NamedTuple):
    """Wait for the messages of the post with this number."""

    post: int


class Start(NamedTuple):
    """Submit an operation, given by its number, to the stream of its channel."""

    operation: int


class Finished(NamedTuple):
    """Wait until an operation has ended."""

    operation: int


Step = Make | Post | Completed | Start | Finished


@dataclass
class Recorded:
    """An operation of a stream: its steps and, if it is a collective, what all members of the channel must agree on.

    words  such as "all_reduce sum of [8]", without the shape if ranks may have different ones; "" for a message
    """

    channel: ChannelId
    steps: list[Step] = field(default_factory=list)
    words: str = ""


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
