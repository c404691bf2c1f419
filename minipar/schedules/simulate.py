"""Simulate a schedule: each rank runs its actions in order, and waits for the results that each action needs."""

from __future__ import annotations

from minipar.schedules.costs import Costs
from minipar.schedules.deadlock import Deadlock
from minipar.schedules.schedule import Action, Schedule, output_key
from minipar.schedules.timeline import Timeline, hop


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return the times at which every action starts and ends, if nothing but `costs` takes time.

    start(a) = max(end of the rank's action before a, end(n) + comm for n in needs(a))
    end(a)   = start(a) + cost(a)

    comm is added only between different ranks. Takes a microsecond or two per action: an action is visited once, and
    once more for every result that its rank had to wait for.
    Raises ValueError for costs that do not fit the schedule, Deadlock if the schedule cannot run to its end.
    """
    costs = costs or Costs()
    seconds, hops = costs.table(schedule.num_stages), costs.hops(schedule.stage_rank)
    spans: dict[Action, tuple[float, float]] = {}
    ends: dict[Action, float] = {}
    asleep: dict[Action, list[int]] = {}
    position, free = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks

    def start_of(action: Action, rank: int) -> float | None:
        start = free[rank]
        for need in schedule.needs(action):
            key = output_key(need)
            end = ends.get(key)
            if end is None:
                asleep.setdefault(key, []).append(rank)
                return None
            start = max(start, end + hop(hops, need, action))
        return start

    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        actions = schedule.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            start = start_of(action, rank)
            if start is None:
                break
            end = free[rank] = start + seconds[action.op][action.stage]
            key = output_key(action)
            spans[action], ends[key] = (start, end), end
            position[rank] += 1
            if key in asleep:
                awake += asleep.pop(key)
    if any(done < len(actions) for done, actions in zip(position, schedule.actions)):
        raise Deadlock(schedule, position)
    return Timeline(schedule, spans, costs)
