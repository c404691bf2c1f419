"""V-Min and V-Half: schedules that repeat one microbatch's pattern; less memory than 1F1B, longer bubbles than ZB-V.

A building block is the start times of one microbatch's actions, in units of F = I = W. It is repeated every six units, the
time of a rank's two chunks. If a rank's six actions start at different times modulo six, the rank does not idle in the
middle. The number of live activations of a chunk is the time from the start of its F to the end of its W, divided by six.
So the pace at which a microbatch goes down and up the V decides the memory.

Source: Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3.
"""

from __future__ import annotations

from itertools import count, product
from typing import NamedTuple

from minipar.schedules.schedule import Action, Op, Schedule
from minipar.support.errors import require_positive

INTERVAL = 6  # two chunks of F, I and W


class Pace(NamedTuple):
    """Units from a rank's start to its neighbour's: of the forward down and up the V, and of the backward down and up."""

    forward_down: int
    forward_up: int
    input_down: int
    input_up: int


def v_min(p: int, m: int) -> Schedule:
    """Return the V schedule with the least memory: about a third of 1F1B's memory, and 2/3 of its idle time.

    The next rank uses each result at once, so a microbatch keeps the activations of a rank's two chunks for about 4p units
    in all. A microbatch starts every 6 units, so about 2p/3 chunks are alive at once, the size of p/3 stages of 1F1B.
    If F=I=W and m >= 2p, ranks idle 4 (p-1) F + F if 3 divides p, else 4 (p-1) F - F; 1F1B, whose stage is two chunks,
    idles 6 (p-1) F. If F, I and W differ, ranks also wait in the middle.
    Raises ValueError if p or m is below 1.
    """
    return _repeat(p, m, Pace(1, 1, 1, 1), "v-min")


def v_half(p: int, m: int) -> Schedule:
    """Return the V schedule with half of 1F1B's memory, and somewhat more than half of its idle time.

    Ranks idle at most 3.5 (p-1) F + F/2 if F=I=W and m >= 2p; 1F1B, whose stage is two chunks, idles 6 (p-1) F. On a rank,
    a microbatch keeps the activations of the two chunks for about 6p units in all. A microbatch starts every 6 units, so
    about p chunks are alive at once, the size of p/2 stages of 1F1B, which keeps p stages' activations.
    Raises ValueError if p or m is below 1.
    """
    return _repeat(p, m, Pace(1, 2, 1, 2), "v-half")


def _repeat(p: int, m: int, pace: Pace, name: str) -> Schedule:
    """Repeat the building block for each of m microbatches. Ranks run their actions in the order of the start times."""
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


def building_block(p: int, pace: Pace) -> list[dict[tuple[Op, int], int]]:
    """Return each rank's {(op, stage): start of microbatch 0}, with the least waiting where the V changes direction."""
    for total in count():
        for pauses in product(range(total + 1), repeat=3):
            if sum(pauses) == total and (block := _block(p, pace, pauses)):
                return block
    raise AssertionError("count() does not end")


def _block(p: int, pace: Pace, pauses: tuple[int, ...]) -> list[dict[tuple[Op, int], int]] | None:
    """Return the block with these pauses at the turns of the V; None if a rank's actions overlap when it repeats."""
    up, down, up_again = (1 + pause for pause in pauses)
    first_up = (p - 1) * pace.forward_down + up  # chunk 1's forward on the last rank
    first_down = first_up + (p - 1) * pace.forward_up + down  # chunk 1's I on rank 0
    last_up = first_down + (p - 1) * pace.input_down + up_again  # chunk 0's I on the last rank
    block = []
    for rank in range(p):
        low, high, left = rank, 2 * p - 1 - rank, p - 1 - rank
        starts: dict[tuple[Op, int], int] = {
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
