"""Lower a schedule to the program of each rank: its computations, with sends and receives inserted.

The programs must not hang even on a transport that guarantees very little: a send completes only when it meets its receive
(rendezvous), and the messages between two ranks, of both directions together, pass in the order in which they were posted.
Posting never blocks; only `Wait` does.

Both ranks of each pair post their transfers in the order in which a simulated run produces them. Suppose that the programs
hang. Let a be the unfinished action that the simulation started first, at time t. Every action that the simulation started
before t has run, so the results that a needs have been computed. Consider a transfer that the simulation had produced by t.
Both ranks have posted it, because each rank posts it only after actions that the simulation started before t. The transfers
ahead of it in the pair's order were also produced by t, so both ranks have posted those as well. So all of these transfers
complete, and a can run: a contradiction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from minipar.schedules.schedule import Action, Schedule, output_key
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline

# Post a receive two actions before the first action that starts after its message has arrived, that is, just before the
# action that precedes the one during which the message arrives.
ACTIONS_AHEAD = 2


class Compute(NamedTuple):
    """Run `action`."""

    action: Action


class Send(NamedTuple):
    """Post a send of the result of `action`, which this rank has just computed."""

    action: Action
    to: int


class Receive(NamedTuple):
    """Post a receive for the result of `action`, which rank `source` computes."""

    action: Action
    source: int


class Wait(NamedTuple):
    """Block until the result of `action` has arrived."""

    action: Action


Instruction = Compute | Send | Receive | Wait
Program = tuple[Instruction, ...]


class Transfer(NamedTuple):
    """A result that rank `source` sends to rank `to`; `end` is the time at which the simulation has computed it."""

    end: float
    source: int
    to: int
    action: Action


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """Return one program per rank: its actions in the schedule's order, each after a `Wait` for every remote result.

    A result is sent once, and only between different ranks: p stages on p ranks send 2m(p-1) messages.
    Raises Deadlock for a schedule that cannot run to its end.
    """
    timeline = simulate(schedule)
    crossings = transfers(timeline)
    arriving = {output_key(transfer.action): transfer.action for transfer in crossings}
    posts = _posts(timeline, crossings)

    def program(rank: int) -> Iterator[Instruction]:
        for position, action in enumerate(schedule.actions[rank]):
            yield from posts[rank, position]
            for need in map(output_key, schedule.needs(action)):
                if need in arriving and schedule.stage_rank[need.stage] != rank:
                    yield Wait(arriving[need])
            yield Compute(action)
        yield from posts[rank, len(schedule.actions[rank])]

    return tuple(tuple(program(rank)) for rank in range(schedule.num_ranks))


def transfers(timeline: Timeline) -> list[Transfer]:
    """Return every result that one rank computes and another needs, in the order in which they are computed."""
    schedule = timeline.schedule
    producer = {output_key(action): action for action in timeline.spans}
    crossings = []
    for action in timeline.spans:
        for need in schedule.needs(action):
            source, to = schedule.stage_rank[need.stage], schedule.stage_rank[action.stage]
            if source != to:
                made = producer[output_key(need)]
                crossings.append(Transfer(timeline.spans[made][1], source, to, made))
    return sorted(crossings)


def _posts(timeline: Timeline, crossings: list[Transfer]) -> dict[tuple[int, int], list[Instruction]]:
    """Return posts[rank, i], posted by `rank` just before its i-th action. Both ranks of a pair post in the same order."""
    actions = timeline.schedule.actions
    starts = [[timeline.spans[action][0] for action in own] for own in actions]
    index = {action: i for own in actions for i, action in enumerate(own)}
    posts: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    last: dict[tuple[int, int], int] = defaultdict(int)  # (rank, peer) -> position of rank's last post
    for end, source, to, action in crossings:
        last[source, to] = index[action] + 1
        posts[source, last[source, to]].append(Send(action, to))
        started = bisect_left(starts[to], end)
        last[to, source] = max(last[to, source], started - ACTIONS_AHEAD)
        posts[to, last[to, source]].append(Receive(action, source))
    return posts
