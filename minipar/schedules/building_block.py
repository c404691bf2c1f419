"""V-Min and V-Half: schedules that repeat one microbatch's pattern, and so trade bubbles for memory.

A building block is the start times of one microbatch's actions, in units of F = I = W. Repeating it every six units, the
work of a rank's two chunks, gives a schedule without idle time in the middle, provided that a rank's six actions start at
different times modulo six. A rank then keeps, of each chunk, as many activations alive as the time from its F to the end of
its W divided by six. So the pace at which a microbatch goes down and up the V decides the memory.

Source: Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3.
"""

from __future__ import annotations

from itertools import count, product
from typing import NamedTuple

from minipar.errors import require_positive
from minipar.schedules.schedule import Action, Schedule

INTERVAL = 6  # two chunks of F, I and W


class Pace(NamedTuple):
    """Units from one rank's start to the next one's: forward down and up the V, then gradients down and up again."""

    forward_down: int
    forward_up: int
    input_down: int
    input_up: int


def v_min(p: int, m: int) -> Schedule:
    """The least memory: about a third of 1F1B's, for more idle time.

    Each result is used at once, so a microbatch's lifetimes on a rank's two chunks add up to about 4p units: 2p/3 chunks,
    p/3 stages of 1F1B. idle 4 (p-1) F + F where 3 divides p, else 4 (p-1) F - F: about 2/3 of 1F1B's 6 (p-1) F, with two
    chunks each, where F=I=W and m >= 2p. Where F, I and W differ, ranks wait in the middle too.
    Raises ValueError where p or m is below 1.
    """
    return _repeat(p, m, Pace(1, 1, 1, 1), "v-min")


def v_half(p: int, m: int) -> Schedule:
    """Half the memory of 1F1B, for somewhat more than half its idle time.

    idle at most 3.5 (p-1) F + F/2 where F=I=W and m >= 2p; 1F1B idles 6 (p-1) F with two chunks each. The lifetimes on a
    rank's two chunks add up to about 6p units: p chunks, p/2 stages of 1F1B.
    Raises ValueError where p or m is below 1.
    """
    return _repeat(p, m, Pace(1, 2, 1, 2), "v-half")


def _repeat(p: int, m: int, pace: Pace, name: str) -> Schedule:
    """Repeat the building block for each of m microbatches. Ranks run their actions in the order of these times."""
    require_positive(p=p, m=m)
    block = building_block(p, pace)
    actions = [
        sorted(
            (start + INTERVAL * k, Action(op, stage, k))
            for (op, stage), start in starts.items()
            for k in range(m)
        )
        for starts in block
    ]
    stage_rank = (*range(p), *reversed(range(p)))
    return Schedule(tuple(tuple(action for _, action in own) for own in actions), stage_rank, m, name)


def building_block(p: int, pace: Pace) -> list[dict[tuple[str, int], int]]:
    """Return, per rank, the start of microbatch 0's (op, stage), with the shortest pauses at the three turns that fit."""
    for total in count():
        for pauses in product(range(total + 1), repeat=3):
            if sum(pauses) == total and (block := _block(p, pace, pauses)):
                return block
    raise AssertionError("count() does not end")


def _block(p: int, pace: Pace, pauses: tuple[int, ...]) -> list[dict[tuple[str, int], int]] | None:
    """Place the block with these pauses at its turns; None where actions of a rank would overlap when it is repeated."""
    up, down, up_again = (1 + pause for pause in pauses)
    first_up = (p - 1) * pace.forward_down + up  # chunk 1's forward on the last rank
    first_down = first_up + (p - 1) * pace.forward_up + down  # chunk 1's I on rank 0
    last_up = first_down + (p - 1) * pace.input_down + up_again  # chunk 0's I on the last rank
    block = []
    for rank in range(p):
        low, high, left = rank, 2 * p - 1 - rank, p - 1 - rank
        starts = {
            ("F", low): rank * pace.forward_down,
            ("F", high): first_up + left * pace.forward_up,
            ("I", high): first_down + rank * pace.input_down,
            ("I", low): last_up + left * pace.input_up,
        }
        taken = {start % INTERVAL for start in starts.values()}
        if len(taken) < len(starts):
            return None
        for stage in (high, low):
            start = next(t for t in count(starts["I", stage] + 1) if t % INTERVAL not in taken)
            taken.add(start % INTERVAL)
            starts["W", stage] = start
        block.append(starts)
    return block
