"""The time that recorded programs take if every rank sends over a link of its own, by the alpha-beta model.

A message occupies its sender's link for alpha seconds, and beta seconds more per byte; it has arrived when the link is free
again. A rank posts a message when its program comes to it, and waits where its program waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.extras.dry_run.record import Completed, Key, Post, Program, key_of


def seconds_on_links(programs: Sequence[Program], alpha: float, beta: float) -> float:
    """Return the seconds until the last of the programs has ended. Computing takes no time.

    Each program runs its operations in turn, as one blocking collective does. Raises ValueError if a rank waits for a
    message that no rank sends.
    """
    steps = {
        program.rank: [step for step in program.steps() if isinstance(step, Post | Completed)]
        for program in programs
    }
    now, link_free = dict.fromkeys(steps, 0.0), dict.fromkeys(steps, 0.0)  # rank -> seconds
    arrived: dict[Key, float] = {}
    posts: dict[tuple[int, int], Post] = {}
    at = dict.fromkeys(steps, 0)
    progress = True
    while progress:
        progress = False
        for rank, own in steps.items():
            while at[rank] < len(own):
                step = own[at[rank]]
                if isinstance(step, Post):
                    posts[rank, step.number] = step
                    if step.send is not None:
                        start = max(now[rank], link_free[rank])
                        link_free[rank] = start + alpha + beta * step.send.num_bytes
                        arrived[key_of(rank, step.send)] = link_free[rank]
                else:
                    post = posts[rank, step.post]
                    keys = [
                        key_of(rank, message) for message in (post.send, post.receive) if message is not None
                    ]
                    if any(key not in arrived for key in keys):
                        break  # the sender's program has not come so far
                    now[rank] = max(now[rank], *(arrived[key] for key in keys))
                at[rank] += 1
                progress = True
    if stuck := [rank for rank, own in steps.items() if at[rank] < len(own)]:
        raise ValueError(f"ranks {stuck} wait for messages that no rank sends")
    return max(now.values(), default=0)
