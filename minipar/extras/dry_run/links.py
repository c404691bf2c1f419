"""The time that recorded programs take if every rank sends over a link of its own, by the alpha-beta model.

A message occupies its sender's link for alpha seconds, and beta seconds more per byte; it has arrived when the link is free
again. A rank posts a message when its program comes to it, and waits where its program waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minipar.extras.dry_run.record import Completed, Key, Post, Program, key_of


def seconds_on_links(programs: Sequence[Program], alpha: float, beta: float) -> float:
    """Return the seconds until the last of the programs has ended. Computing takes no time.

    Each program runs its operations in turn, as one blocking collective does. Raises ValueError if a rank waits for a
    message that no rank sends.
    """
    arrived: dict[Key, float] = {}
    ended: dict[int, float] = {}  # rank -> seconds

    def run(program: Program) -> Iterator[bool]:
        """Execute as far as possible; yield False where a message has not been sent."""
        now = link_free = 0.0
        posts: dict[int, Post] = {}
        for step in program.steps:
            if isinstance(step, Post):
                posts[step.number] = step
                if step.send is not None:
                    link_free = max(now, link_free) + alpha + beta * step.send.num_bytes
                    arrived[key_of(program.rank, step.send)] = link_free
            elif isinstance(step, Completed):
                for message in filter(None, posts[step.post][1:]):
                    while (key := key_of(program.rank, message)) not in arrived:
                        yield False
                    now = max(now, arrived[key])
        ended[program.rank] = now

    running = {program.rank: run(program) for program in programs}
    while running:
        before = len(arrived), len(ended)
        running = {rank: program for rank, program in running.items() if not next(program, True)}
        if running and before == (len(arrived), len(ended)):
            raise ValueError(f"ranks {[*running]} wait for messages that no rank sends")
    return max(ended.values(), default=0)
