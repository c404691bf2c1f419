"""A rank's program, recorded: its messages, the waits for them, and its collectives, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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


class Post(NamedTuple):
    """Post a send, a receive, or both as one group; neither where the peer is not run. `number` counts a rank's posts."""

    number: int
    send: Message | None
    receive: Message | None


class Completed(NamedTuple):
    """Wait for the messages of the post with this number."""

    post: int


@dataclass
class Program:
    """The recorded program of a rank.

    collectives  channel -> what all members of the channel must agree on, in order, such as "all_reduce sum of [8]";
                 without the shape if ranks may have different ones
    ended        False if the rank raised an error, or waited for integers that no rank sent
    """

    rank: int
    steps: list[Post | Completed] = field(default_factory=list)
    collectives: dict[ChannelId, list[str]] = field(default_factory=lambda: defaultdict(list))
    num_posts: int = 0
    ended: bool = False

    def posted(self) -> Iterator[Message]:
        """Yield the messages that this rank sends or receives, in the order in which it posts them."""
        for step in self.steps:
            if isinstance(step, Post):
                yield from filter(None, step[1:])

    def messages(self) -> Iterator[Message]:
        """Yield the messages that this rank sends."""
        return (message for message in self.posted() if message.verb == "send")
