"""Run a schedule on paper: every rank obeys its own order, and waits for what an action needs."""

from __future__ import annotations

from minipar.schedules.costs import Costs
from minipar.schedules.deadlock import Deadlock
from minipar.schedules.schedule import Action, Schedule, needs, output_key
from minipar.schedules.timeline import Timeline, hop


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The times at which every action starts and ends, if nothing but `costs` takes time.

    start(a) = max(end of the rank's action before a, end(n) + comm for n in needs(a))
    end(a)   = start(a) + cost(a)

    comm counts between different ranks only. Each action is visited once and once more for each time its rank
    falls asleep on it: about a microsecond or two an action.
    Raises ValueError for costs that don't fit, Deadlock where the schedule can't run to its end.
    """
    costs = costs or Costs()
    num_stages = schedule.num_stages
    seconds, hops = costs.table(num_stages), costs.hops(schedule.stage_rank)
    spans: dict[Action, tuple[float, float]] = {}
    ends: dict[Action, float] = {}
    asleep: dict[Action, list[int]] = {}
    position, free = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks

    def start_of(action: Action, rank: int) -> float | None:
        start = free[rank]
        for need in needs(action, num_stages):
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
