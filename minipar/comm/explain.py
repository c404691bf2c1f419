"""What went wrong between ranks, told from every rank's account of its messages: pure functions, no communication.

A rank's account says how many messages it has posted to and from every other, and which it waits for. Put together they
prove a deadlock before its deadline, and show a message nobody asked for.
"""

from __future__ import annotations

from minipar.comm.link import Account, Message


def surplus(accounts: dict[int, Account]) -> list[str]:
    """Messages sent and never received, and receives posted in vain: one sentence a pair, none if all is well."""
    found = []
    for rank, account in sorted(accounts.items()):
        for (channel, lane, to), (sent, _) in account.sent.items():
            received = _posted(accounts, to, "receive", channel, lane, rank)[0]
            if sent > received:
                found.append(
                    f"rank {rank} sent rank {to} {_count(sent - received)} on {channel} that was not received"
                )
        for (channel, lane, source), (received, _) in account.received.items():
            sent = _posted(accounts, source, "send", channel, lane, rank)[0]
            if received > sent:
                found.append(
                    f"rank {rank} asked rank {source} for {_count(received - sent)} on {channel} that was not sent"
                )
    return found


def deadlock(accounts: dict[int, Account], blocked: set[int], finished: set[int]) -> dict[int, str] | None:
    """Why no rank can go on, as a sentence for each blocked one; None while one of them still might.

    Ranks neither blocked nor finished are at work, so there is no deadlock. A wait is hopeless if the other side has
    not posted its half (and cannot, being blocked or finished itself), or has posted one of another length.
    """
    if not blocked or set(accounts) - blocked - finished:
        return None
    why = {
        rank: [_hopeless(accounts, rank, message, finished) for message in accounts[rank].waiting]
        for rank in blocked
    }
    if any(not reasons or None in reasons for reasons in why.values()):
        return None
    return {rank: "; ".join(reasons) for rank, reasons in why.items()}


def _hopeless(accounts, rank: int, message: Message, finished: set[int]) -> str | None:
    other = "receive" if message.verb == "send" else "send"
    posted, num_bytes = _posted(accounts, message.peer, other, message.channel, message.lane, rank)
    waits = f"rank {rank} waits to {message}"
    if posted <= message.number:
        state = "has returned" if message.peer in finished else "is blocked itself"
        return f"{waits}, which {state}"
    if posted == message.number + 1 and num_bytes != message.num_bytes:
        return f"{waits}, but rank {message.peer} posted that {other} with {num_bytes} bytes"
    return None


def _posted(accounts, rank: int, verb: str, channel: str, lane: str, peer: int) -> tuple[int, int]:
    if rank not in accounts:
        return (0, 0)
    table = accounts[rank].sent if verb == "send" else accounts[rank].received
    return table.get((channel, lane, peer), (0, 0))


def _count(n: int) -> str:
    return f"{n} message{'s' if n > 1 else ''}"
