"""Hanayo's waves: a microbatch passes down and up the ranks repeatedly, through one chunk per rank each time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from minipar.schedules.schedule import Action, Schedule
from minipar.support.errors import require_positive

UNITS = {"F": 1, "B": 2}  # F = I = W
Urgency = tuple[int, int, int]


def hanayo(p: int, m: int, v: int = 2) -> Schedule:
    """Return waves: stages 0 ... p-1 on ranks 0 ... p-1, the next p on ranks p-1 ... 0, and so on, v chunks per rank.

    A turn at the first or last rank needs no message, so a microbatch sends v (p-1) messages per direction; interleaved
    sends v p - 1. At most 2p microbatches are under way, so a rank keeps at most 2p v chunks alive, twice the memory of
    1F1B's first rank. A rank runs a ready backward if there is one, otherwise the ready forward of the latest stage.
    For every v, a rank idles at most 4p F if m = p and F=I=W; 1F1B, whose stage is v chunks, idles 3v (p-1) F. With more
    microbatches the idle time grows, and interleaved idles less.
    Raises ValueError if p, m or v is below 1, or v is odd.
    Source: Hanayo, arXiv:2308.15762, section 3, which generates the order by the same two priorities.
    """
    require_positive(p=p, m=m, v=v)
    if v % 2:
        raise ValueError(f"{v} chunks a rank: a wave goes down and up; use an even number, such as {v + 1}")
    stage_rank = (*range(p), *reversed(range(p))) * (v // 2)
    return Schedule(run_what_is_ready(stage_rank, m, in_flight=2 * p), stage_rank, m, "hanayo")


def run_what_is_ready(stage_rank: Sequence[int], m: int, in_flight: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions if a rank idles only when none of its actions is ready, by increasing `_urgency`.

    At most `in_flight` microbatches are under way. F takes one unit of time, B two. Building the order takes a microsecond
    or two per action.
    """
    last, ranks = len(stage_rank) - 1, range(max(stage_rank) + 1)
    order: list[list[Action]] = [[] for _ in ranks]
    ready: list[list[tuple[Urgency, Action]]] = [[] for _ in ranks]
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


def _urgency(action: Action) -> Urgency:
    """Return a sort key: backwards first, earliest stage first; then forwards, latest stage first."""
    if action.op == "B":
        return 0, action.stage, action.microbatch
    return 1, -action.stage, action.microbatch
