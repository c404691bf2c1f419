"""From a schedule to what each rank executes: its computations, with sends and receives inserted.

What has to hold is that no order of events can hang, with the least a transport may promise: a send completes
only when it meets its receive (rendezvous), and between two ranks messages of both directions pass in one
order, that in which they were posted. Posting never blocks; only `Wait` does.

Take the transfers in the order in which a simulated run produces them, and let both ends of each pair of
ranks post in this order. Suppose the result were stuck, and look at the unfinished action that the
simulation started first. All it needs has been computed, for that started earlier. Every transfer the
simulation had made by then is posted at both ends, for it comes after actions that all started earlier; and
these transfers are the first on their channels. So they complete, and the action can run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from minipar.schedules.schedule import Action, Schedule, needs, output_key
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline

ACTIONS_AHEAD = 2  # a receive is up before the action during which it arrives, and before one more to spare


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
    """A result that crosses from rank `source` to rank `to`; `end` is when the simulation has it."""

    end: float
    source: int
    to: int
    action: Action


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """One program a rank: its actions in the schedule's order, each after a `Wait` for what comes from afar.

    A result crosses once, and only between different ranks: 2m(s-1) messages for s stages on s ranks.
    Raises Deadlock for a schedule that can't run.
    """
    timeline = simulate(schedule)
    crossings = transfers(timeline)
    arriving = {output_key(transfer.action): transfer.action for transfer in crossings}
    posts = _posts(timeline, crossings)

    def program(rank: int):
        for position, action in enumerate(schedule.actions[rank]):
            yield from posts[rank, position]
            for need in map(output_key, needs(action, schedule.num_stages)):
                if need in arriving and schedule.stage_rank[need.stage] != rank:
                    yield Wait(arriving[need])
            yield Compute(action)
        yield from posts[rank, len(schedule.actions[rank])]

    return tuple(tuple(program(rank)) for rank in range(schedule.num_ranks))


def transfers(timeline: Timeline) -> list[Transfer]:
    """Every result that one rank computes and another needs, in the order of computing."""
    schedule = timeline.schedule
    producer = {output_key(action): action for action in timeline.spans}
    crossings = []
    for action in timeline.spans:
        for need in needs(action, schedule.num_stages):
            source, to = schedule.stage_rank[need.stage], schedule.stage_rank[action.stage]
            if source != to:
                made = producer[output_key(need)]
                crossings.append(Transfer(timeline.spans[made][1], source, to, made))
    return sorted(crossings)


def _posts(timeline: Timeline, crossings: list[Transfer]) -> dict[tuple[int, int], list[Instruction]]:
    """posts[rank, i]: what `rank` posts just before its i-th action; both ends of a pair in one order."""
    actions = timeline.schedule.actions
    starts = [[timeline.spans[action][0] for action in own] for own in actions]
    index = {action: i for own in actions for i, action in enumerate(own)}
    posts: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    last: dict[tuple[int, int], int] = defaultdict(int)  # (rank, peer) -> where rank last posted to peer
    for end, source, to, action in crossings:
        last[source, to] = index[action] + 1
        posts[source, last[source, to]].append(Send(action, to))
        started = bisect_left(starts[to], end)
        last[to, source] = max(last[to, source], started - ACTIONS_AHEAD)
        posts[to, last[to, source]].append(Receive(action, source))
    return posts
