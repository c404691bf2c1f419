"""TeraPipe and Seq1F1B: the tokens of a sample pass through the stages in slices, one behind the other.

Causal attention lets a slice be computed without the tokens after it, so m microbatches of s slices are m s units of work
and the idle time is that of m s microbatches. A slice sees the keys and values of the earlier ones, which each stage keeps;
so a sample's forwards run in ascending order of slices, its backwards in descending order (see `needs`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from minipar.errors import require_positive
from minipar.schedules.one_f_one_b import alternate
from minipar.schedules.schedule import Action, Schedule

SliceCost = Callable[[int, int], float]  # (tokens before the slice, its tokens) -> seconds


def terapipe(p: int, m: int, slices: int) -> Schedule:
    """GPipe over slices: all m s forwards, then all backwards, each sample's last slice first.

    bubble over ideal (p-1)/(m s) for slices of equal cost; every rank keeps m s units alive, as many tokens as GPipe.
    One slice makes it GPipe. Raises ValueError where p, m or slices is below 1.
    Source: TeraPipe, arXiv:2102.07988, section 3.2.
    """
    require_positive(p=p, m=m, slices=slices)
    actions = tuple(tuple(_forwards(rank, m, slices) + _backwards(rank, m, slices)) for rank in range(p))
    return Schedule(actions, tuple(range(p)), m, "terapipe", slices)


def seq1f1b(p: int, m: int, slices: int) -> Schedule:
    """1F1B over slices: s-1 more warm-up forwards than 1F1B's, as a sample's first backward is that of its last slice.

    bubble over ideal (p-1)/(m s) for slices of equal cost; rank r keeps min(p - r + s - 1, m s) units alive, which are
    (p - r + s - 1)/s microbatches where 1F1B keeps p - r. One slice makes it 1F1B.
    Raises ValueError where p, m or slices is below 1.
    Source: Seq1F1B, arXiv:2406.03488, section 3.2.
    """
    require_positive(p=p, m=m, slices=slices)
    actions = (
        alternate(p - 1 - rank + slices - 1, _forwards(rank, m, slices), _backwards(rank, m, slices))
        for rank in range(p)
    )
    return Schedule(tuple(map(tuple, actions)), tuple(range(p)), m, "seq1f1b", slices)


def _forwards(stage: int, m: int, slices: int) -> list[Action]:
    return [Action("F", stage, unit) for unit in range(m * slices)]


def _backwards(stage: int, m: int, slices: int) -> list[Action]:
    return [Action("B", stage, k * slices + n) for k in range(m) for n in reversed(range(slices))]


def slice_tokens(
    seq_len: int, slices: int, cost: SliceCost, p: int = 2, m: int = 1, multiple: int = 1
) -> tuple[int, ...]:
    """Cut a sample into slices so that m samples pass through p stages soonest; return the tokens of each slice.

    time = m * (sum of the slices' costs) + (p-1) * (the largest)        of all cuts the least, by dynamic programming

    cost      (tokens before the slice, its tokens) -> a stage's seconds. A later slice attends to more keys, so with equal
              tokens it takes longer
    multiple  of so many tokens is every slice but the last; n = ceil(seq_len / multiple) parts are not cut

    Of several best cuts, returns one. Takes O(slices n^2) time for each largest cost that is tried: one, if the sum is the
    same for every cut, as it is where a token costs a constant and one more for each key.
    Raises ValueError where there are fewer parts than slices.
    Source: TeraPipe, arXiv:2102.07988, section 3.3.
    """
    require_positive(seq_len=seq_len, slices=slices, p=p, m=m, multiple=multiple)
    ends = [*range(0, seq_len, multiple), seq_len]
    if len(ends) <= slices:
        whole = f" in multiples of {multiple}" if multiple > 1 else ""
        raise ValueError(
            f"slices={slices} are more than seq_len={seq_len} has tokens{whole}; use {len(ends) - 1} or fewer"
        )
    seconds = {(a, b): cost(a, b - a) for i, a in enumerate(ends) for b in ends[i + 1 :]}
    least, _ = _cut(ends, slices, seconds, operator.add, math.inf)
    smallest, _ = _cut(ends, slices, seconds, max, math.inf)
    best = (math.inf, ())
    for largest in sorted({took for took in seconds.values() if took >= smallest}):
        if m * least + (p - 1) * largest >= best[0]:
            break
        total, sizes = _cut(ends, slices, seconds, operator.add, largest)
        best = min(best, (m * total + (p - 1) * largest, sizes))
    return best[1]


def _cut(
    ends: Sequence[int], slices: int, seconds: dict, join: Callable, largest: float
) -> tuple[float, tuple[int, ...]]:
    """Return the cut with the least sum (`join` is +) or the least maximum, without a slice that takes over `largest`."""
    best = {0: (0.0, ())}  # end of the last slice so far -> the least, and the sizes
    for left in reversed(range(slices)):
        best = {
            b: min(options)
            for b in (ends if left else ends[-1:])
            if (
                options := [
                    (join(so_far, seconds[a, b]), (*sizes, b - a))
                    for a, (so_far, sizes) in best.items()
                    if a < b and seconds[a, b] <= largest
                ]
            )
        }
    return best.get(ends[-1], (math.inf, ()))
