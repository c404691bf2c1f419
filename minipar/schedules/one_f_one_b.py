"""1F1B, plain and interleaved: a warm-up of forwards, then one forward and one backward in turn.

Adds to `simple/pipeline.py`: schedules as data, and several chunks per rank.
"""

from __future__ import annotations

from minipar.schedules.schedule import Action, Schedule, first_microbatches
from minipar.support.errors import require_positive


def alternate(num_warmup: int, forwards: list[Action], backwards: list[Action]) -> list[Action]:
    """Return `num_warmup` forwards, then one forward and one backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    steady = len(forwards) - num_warmup
    pairs = zip(forwards[num_warmup:], backwards)
    return forwards[:num_warmup] + [action for pair in pairs for action in pair] + backwards[steady:]


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return 1F1B with a flush: rank r starts with p-1-r forwards, to cover the time until its first gradient arrives.

    The bubble is (p-1)/m of the ideal time, the same as GPipe's; rank r keeps min(p-r, m) microbatches alive, where GPipe
    keeps m.
    Raises ValueError if p or m is below 1.
    Source: PipeDream-Flush, as in arXiv:2104.04473, section 2.2.1.
    """
    require_positive(p=p, m=m)
    actions = (
        alternate(
            p - 1 - rank,
            [Action("F", rank, k) for k in range(m)],
            [Action("B", rank, k) for k in range(m)],
        )
        for rank in range(p)
    )
    return Schedule(tuple(map(tuple, actions)), tuple(range(p)), m, "1f1b")


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Return 1F1B with v chunks per rank: rank r holds stages r, r+p, ... and runs microbatches in groups of p.

    If p divides m, the bubble is (p-1)/(vm) of the ideal time, for stages of equal cost and without latency. If v >= 2,
    rank r keeps min(2(p-r-1) + (v-1)p + 1, mv) chunks alive if p divides m, and at most that many for any other m.
    If p does not divide m, take the order for the next multiple of p, without its microbatches from m on. This is correct
    for every m, and takes at most as long as that multiple of microbatches would. v=1 is 1F1B.
    Raises ValueError if p, m or v is below 1.
    Source: arXiv:2104.04473, section 2.2.2.
    """
    require_positive(p=p, m=m, v=v)
    if v == 1:
        return Schedule(one_f_one_b(p, m).actions, tuple(range(p)), m, "interleaved")
    return Schedule(
        tuple(first_microbatches(m, _interleaved_rank(p, m, v, rank)) for rank in range(p)),
        tuple(stage % p for stage in range(p * v)),
        m,
        "interleaved",
    )


def _interleaved_rank(p: int, m: int, v: int, rank: int) -> list[Action]:
    groups = [range(first, first + p) for first in range(0, m, p)]
    stages = range(rank, p * v, p)
    return alternate(
        2 * (p - rank - 1) + (v - 1) * p,
        [Action("F", stage, k) for group in groups for stage in stages for k in group],
        [Action("B", stage, k) for group in groups for stage in reversed(stages) for k in group],
    )
