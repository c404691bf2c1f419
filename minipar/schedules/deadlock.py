"""The error for a schedule that cannot run to its end: the blocked ranks, what each waits for, and the cycle."""

from __future__ import annotations

from collections.abc import Sequence

from minipar.schedules.schedule import Action, Schedule, output_key


class Deadlock(ValueError):
    """Raised if no rank can run its next action.

    blocked   rank -> the action that it cannot start
    cycle     ranks that each wait for the next, and the last for the first; empty if a needed action is missing from the
              schedule
    """

    def __init__(self, schedule: Schedule, position: Sequence[int]):
        """`position[rank]` is the number of actions that the rank has run."""
        self.blocked = {
            rank: actions[done]
            for rank, (actions, done) in enumerate(zip(schedule.actions, position))
            if done < len(actions)
        }
        ran = {output_key(a) for actions, done in zip(schedule.actions, position) for a in actions[:done]}
        home = {output_key(a): rank for rank, actions in enumerate(schedule.actions) for a in actions}
        missing = {
            rank: next(n for n in schedule.needs(action) if output_key(n) not in ran)
            for rank, action in self.blocked.items()
        }
        waits = {rank: home.get(output_key(need)) for rank, need in missing.items()}
        self.cycle = _cycle(waits)
        super().__init__(_message(schedule.name, self.blocked, missing, waits, self.cycle))


def _cycle(waits: dict[int, int | None]) -> tuple[int, ...]:
    """Return a cycle in `waits`, which maps each rank to the rank it waits for; empty if there is none."""
    for first in waits:
        rank: int | None = first
        seen: list[int] = []
        while rank is not None and rank not in seen:
            seen.append(rank)
            rank = waits.get(rank)
        if rank is not None:
            return tuple(seen[seen.index(rank) :])
    return ()


def _message(
    name: str,
    blocked: dict[int, Action],
    missing: dict[int, Action],
    waits: dict[int, int | None],
    cycle: tuple[int, ...],
) -> str:
    def where(rank: int) -> str:
        return "which the schedule does not have" if waits[rank] is None else f"on rank {waits[rank]}"

    stuck = "; ".join(f"rank {r} cannot run {a} before {missing[r]}, {where(r)}" for r, a in blocked.items())
    round_trip = " -> ".join(f"rank {rank}" for rank in (*cycle, *cycle[:1]))
    return f"the schedule {name!r} deadlocks: {stuck}" + (f"; cycle: {round_trip}" if cycle else "")
