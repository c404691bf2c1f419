"""V-Min: a schedule that repeats one microbatch's pattern; less memory than 1F1B, longer bubbles than ZB-V.

A building block is the start times of one microbatch's actions, in units of F = I = W. It is repeated every six units, the
time of a rank's two chunks. If a rank's six actions start at different times modulo six, the rank does not idle in the
middle. The number of live activations of a chunk is the time from the start of its F to the end of its W, divided by six.
So the pace at which a microbatch goes down and up the V decides the memory: V-Min uses every result at once, and V-Half,
whose ways up go at half the pace, keeps a half of 1F1B's memory.

Source: Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3.
"""

from __future__ import annotations

from minipar.schedules.schedule import Action, Op, Schedule
from minipar.support.errors import require_positive

INTERVAL = 6  # two chunks of F, I and W


def v_min(p: int, m: int) -> Schedule:
    """Return the V schedule with the least memory: about a third of 1F1B's memory, and 2/3 of its idle time.

    The next rank uses each result at once, so a microbatch keeps the activations of a rank's two chunks for about 4p units
    in all. A microbatch starts every 6 units, so about 2p/3 chunks are alive at once, the size of p/3 stages of 1F1B.
    If F=I=W and m >= 2p, ranks idle 4 (p-1) F + F if 3 divides p, else 4 (p-1) F - F; 1F1B, whose stage is two chunks,
    idles 6 (p-1) F. If F, I and W differ, ranks also wait in the middle.
    Raises ValueError if p or m is below 1.
    """
    require_positive(p=p, m=m)
    actions = []
    for rank in range(p):
        block = building_block(p, rank).items()
        starts = {
            Action(op, stage, k): start + INTERVAL * k for (op, stage), start in block for k in range(m)
        }
        actions.append(tuple(sorted(starts, key=lambda action: starts[action])))
    return Schedule(tuple(actions), (*range(p), *reversed(range(p))), m, "v-min")


def building_block(p: int, rank: int) -> dict[tuple[Op, int], int]:
    """Return the start of each action of microbatch 0 on a rank.

    F(s)   s                   every stage follows the one before it at once
    I(s)   4p - 1 - s + wait   back up; two units of waiting after the last F, if 3 divides p, keep a rank's actions apart
    W(s)                       the first free unit after I(s), modulo six
    """
    chunks = 2 * p - 1 - rank, rank  # the later chunk runs backward first
    wait = 0 if p % 3 else 2
    starts: dict[tuple[Op, int], int] = {}
    for stage in chunks:
        starts["F", stage], starts["I", stage] = stage, 4 * p - 1 - stage + wait
    free = set(range(INTERVAL)) - {start % INTERVAL for start in starts.values()}
    for stage in chunks:
        after = starts["I", stage] + 1
        start = after + min((unit - after) % INTERVAL for unit in free)
        starts["W", stage] = start
        free.remove(start % INTERVAL)
    return starts
