"""Hanayo's waves: each rank holds a chunk on every way down and up through the ranks, so that turns need no message."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from minipar.errors import require_positive
from minipar.schedules.schedule import Action, Schedule

UNITS = {"F": 1, "B": 2}  # F = I = W


def hanayo(p: int, m: int, v: int = 2) -> Schedule:
    """Waves: stages 0 ... p-1 on ranks 0 ... p-1, the next p on ranks p-1 ... 0, and so on: v chunks per rank, v/2 waves.

    A result that turns at the first or last rank is already there: v (p-1) messages per microbatch and direction, where
    interleaved sends v p - 1. At most 2p microbatches are under way, so a rank keeps at most 2p v chunks alive, twice the
    memory of 1F1B's first rank. Ranks run what is ready: backwards first, then the forward that is furthest.
    idle at most 4p F where m = p and F=I=W, whatever v is: 1F1B, with v chunks each, idles 3v (p-1) F. With more
    microbatches it grows, and interleaved has less.
    Raises ValueError where p, m or v is below 1, or v is odd.
    Source: Hanayo, arXiv:2308.15762, section 3. Its order is generated there by the same two priorities.
    """
    require_positive(p=p, m=m, v=v)
    if v % 2:
        raise ValueError(f"v={v} chunks a rank: a wave goes down and up; use an even number, such as {v + 1}")
    stage_rank = (*range(p), *reversed(range(p))) * (v // 2)
    return Schedule(run_what_is_ready(stage_rank, m, in_flight=2 * p), stage_rank, m, "hanayo")


def run_what_is_ready(stage_rank: Sequence[int], m: int, in_flight: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of ranks that never idle while one of theirs is ready, with `in_flight` microbatches under way.

    A microsecond or two per action. Time: F takes one unit, B two.
    """
    last, ranks = len(stage_rank) - 1, range(max(stage_rank) + 1)
    order: list[list[Action]] = [[] for _ in ranks]
    ready: list[list[tuple[tuple, Action]]] = [[] for _ in ranks]
    free = [0 for _ in ranks]
    running: list[tuple[int, Action]] = []  # a heap of (end, action)
    admitted = min(m, in_flight)

    def becomes_ready(action: Action) -> None:
        heappush(ready[stage_rank[action.stage]], (_urgency(action), action))

    for k in range(admitted):
        becomes_ready(Action("F", 0, k))
    now = 0
    while True:
        for rank in ranks:
            if ready[rank] and free[rank] <= now:
                _, action = heappop(ready[rank])
                order[rank].append(action)
                free[rank] = now + UNITS[action.op]
                heappush(running, (free[rank], action))
        if not running:
            return tuple(map(tuple, order))
        now = running[0][0]
        while running and running[0][0] == now:
            op, stage, k = heappop(running)[1]
            if op == "F":
                becomes_ready(Action("F", stage + 1, k) if stage < last else Action("B", stage, k))
            elif stage:
                becomes_ready(Action("B", stage - 1, k))
            elif admitted < m:
                becomes_ready(Action("F", 0, admitted))
                admitted += 1


def _urgency(action: Action) -> tuple:
    """The smallest comes first: backwards, those near the end first; then forwards, the furthest first."""
    if action.op == "B":
        return 0, action.stage, action.microbatch
    return 1, -action.stage, action.microbatch
