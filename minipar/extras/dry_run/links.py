"""The time that recorded programs take if every rank sends over a link of its own, by the alpha-beta model.

A message occupies its sender's link for alpha seconds, and beta seconds more per byte; it has arrived when the link is free
again. A rank posts a message when its program comes to it, and waits where its program waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minipar.comm.transport.messages import Message
from minipar.extras.dry_run.record import Post, Program, Wait

# (channel's name, lane, sender, receiver, number)
Key = tuple[str, str, int, int, int]


def seconds_on_links(programs: Sequence[Program], alpha: float, beta: float) -> float:
    """Return the seconds until the last of the programs has ended. Computing takes no time.

    Each program runs its operations in turn, as one blocking collective does. Raises ValueError if a rank waits for a
    message that no rank sends.
    """
    now, arrived = {program.rank: 0.0 for program in programs}, dict[Key, float]()
    waiting = {program.rank: _steps(program, now, arrived, alpha, beta) for program in programs}
    while waiting:
        before = len(arrived), len(waiting)
        waiting = {rank: steps for rank, steps in waiting.items() if next(steps, "ended") != "ended"}
        if before == (len(arrived), len(waiting)):
            raise ValueError(f"ranks {list(waiting)} wait for messages that no rank sends")
    return max(now.values(), default=0)


def _steps(
    program: Program, now: dict[int, float], arrived: dict[Key, float], alpha: float, beta: float
) -> Iterator[Key]:
    """Execute a program; yield each message that it waits for, until that has been sent."""
    rank, link_free = program.rank, 0.0
    for step in program.steps():
        if isinstance(step, Post) and step.send is not None:
            link_free = max(now[rank], link_free) + alpha + beta * step.send.num_bytes
            arrived[_key(rank, step.send)] = link_free
        elif isinstance(step, Wait) and isinstance(step.on, Post):
            for key in [_key(rank, message) for message in step.on if message is not None]:
                while key not in arrived:
                    yield key
                now[rank] = max(now[rank], arrived[key])


def _key(rank: int, message: Message) -> Key:
    sender, receiver = (rank, message.peer) if message.verb == "send" else (message.peer, rank)
    return message.channel.name, message.lane, sender, receiver, message.number
