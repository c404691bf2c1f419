"""Explanations of failures from every rank's message counts: pure functions, no communication.

A rank's counts say how many messages it has posted to and from every other rank, and which message it waits for. The
counts of all ranks prove a deadlock before the deadline passes, and show messages that were never received.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from minipar.comm.transport.messages import Channel, ChannelId, Message, OnLink, Posts, counted
from minipar.comm.transport.stream import Waits

# channel, "p2p" or "collective", peer as a world rank
Line = tuple[ChannelId, str, int]
NOTHING: Posts = (0, 0, "")


class MessageCounts(NamedTuple):
    """The message that a rank waits for, and the messages that it has posted."""

    waiting: list[object]
    sent: dict[Line, Posts]
    received: dict[Line, Posts]


def message_counts(waits: Waits, channels: Iterable[Channel]) -> MessageCounts:
    """Return a rank's counts: what its threads wait for, and the messages of its channels."""
    waiting = [wait.as_message() if isinstance(wait, OnLink) else wait for wait in list(waits.values())]
    counts = MessageCounts(waiting, {}, {})
    for channel in list(channels):
        for table, posted in ((counts.sent, channel.sent), (counts.received, channel.received)):
            for (peer, lane), last in list(posted.items()):
                table[channel.key, lane, peer] = last
    return counts


class UnmatchedMessages(NamedTuple):
    """A sentence about messages that `rank` posted and its peer did not match."""

    rank: int
    sentence: str


def unmatched_messages(counts: dict[int, MessageCounts]) -> list[UnmatchedMessages]:
    """List sends never received, and receives that no send matches: one entry per pair of ranks, channel and lane."""
    found = []
    for rank, own in sorted(counts.items()):
        for (channel, lane, to), (sent, _, label) in own.sent.items():
            received = _posted(counts, to, "receive", channel, lane, rank)[0]
            if sent > received:
                what = f"rank {rank} sent {_lost(sent - received, f'to rank {to} on {channel}', 'received', label)}"
                found.append(UnmatchedMessages(rank, what))
        for (channel, lane, source), (received, _, label) in own.received.items():
            sent = _posted(counts, source, "send", channel, lane, rank)[0]
            if received > sent:
                lost = _lost(received - sent, f"on {channel}", "sent", label)
                what = f"rank {rank} asked rank {source} for {lost}"
                found.append(UnmatchedMessages(rank, what))
    return found


def deadlock(
    counts: dict[int, MessageCounts], blocked: set[int], finished: set[int]
) -> dict[int, str] | None:
    """Return, for each blocked rank, a sentence on why it can never proceed; None while any rank may still proceed.

    A rank that is neither blocked nor finished is running, so there is no deadlock. A wait is hopeless if the peer has not
    posted the matching message (and cannot, being blocked or finished), or posted another length, dtype or operation.
    On a link of shared memory it is hopeless also if the peer has posted the message, but can itself never proceed.

    The counts are not taken at one moment: two successive ones must prove the same deadlock.
    """
    if not blocked or set(counts) - blocked - finished:
        return None
    why: dict[int, str] = {}
    while True:
        found = {rank: _why_stuck(counts, rank, finished, set(why)) for rank in blocked - set(why)}
        more = {rank: reason for rank, reason in found.items() if reason is not None}
        if not more:
            return why if set(why) == blocked else None
        why |= more


def _why_stuck(
    counts: dict[int, MessageCounts], rank: int, finished: set[int], stuck: set[int]
) -> str | None:
    """Return why no wait of a rank can end, if the ranks `stuck` never proceed; None if one may end."""
    waiting = counts[rank].waiting
    reasons = [_why_never_completes(counts, rank, message, finished, stuck) for message in waiting]
    certain = [reason for reason in reasons if reason is not None]
    return "; ".join(certain) if certain and len(certain) == len(reasons) else None


def last_waited_for(rank: int, waits_for: dict[int, int]) -> int:
    """Follow the waits from `rank` on, and return the rank at the end of the chain; if there is a cycle, return `rank`."""
    here = rank
    seen: set[int] = set()
    while here in waits_for:
        if here in seen:
            return rank
        seen.add(here)
        here = waits_for[here]
    return here


def _why_never_completes(
    counts: dict[int, MessageCounts], rank: int, message: object, finished: set[int], stuck: set[int]
) -> str | None:
    if not isinstance(message, Message):
        return None
    other = "receive" if message.verb == "send" else "send"
    does = "expects" if message.verb == "send" else "sends"
    posted, num_bytes, label = _posted(counts, message.peer, other, message.channel, message.lane, rank)
    waits = f"rank {rank} waits to {message}"
    if posted <= message.number or (message.needs_peer and message.peer in stuck):
        state = "'s function has returned" if message.peer in finished else " is blocked itself"
        return f"{waits}, but rank {message.peer}{state}"
    if posted == message.number + 1 and (num_bytes, label) != (message.num_bytes, message.label):
        of = f" of {label}" if label else ""
        return f"{waits}, but rank {message.peer} {does} {counted(num_bytes, 'byte')}{of}"
    return None


def _posted(
    counts: dict[int, MessageCounts], rank: int, verb: str, channel: ChannelId, lane: str, peer: int
) -> Posts:
    if rank not in counts:
        return NOTHING
    table = counts[rank].sent if verb == "send" else counts[rank].received
    return table.get((channel, lane, peer), NOTHING)


def _lost(n: int, where: str, missing: str, label: str) -> str:
    """Return, for example, "1 message to rank 1 on comm 'world' that was not received (float32)"."""
    of = f" ({label})" if label else ""
    return f"{counted(n, 'message')} {where} that {'was' if n == 1 else 'were'} not {missing}{of}"
