"""TeraPipe and Seq1F1B: the tokens of a sample pass through the stages in slices, one after another.

With causal attention, a slice needs no later tokens. So m microbatches of s slices are m * s units of work, and ranks idle
as little as with m * s microbatches. A slice attends to the keys and values of the earlier slices, which each stage keeps.
So a sample's slices run forward in ascending order, and backward in descending order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from minipar.schedules.one_f_one_b import alternate
from minipar.schedules.schedule import Action, Schedule
from minipar.support.errors import require_positive

Cut = tuple[float, tuple[int, ...]]  # (seconds, number of tokens of each slice)
SliceCost = Callable[[int, int], float]  # (tokens before the slice, its tokens) -> seconds


@dataclass(frozen=True)
class SlicedSchedule(Schedule):
    """A schedule whose actions each work on a unit, a slice of a microbatch: unit k is slice k % slices of k // slices.

    In addition to what `needs` says of whole microbatches, an action needs, on the same stage,

    F(s, k)   keys and values of earlier slices    F(s, k-1), unless k is a sample's first slice
    B(s, k)   their gradients from later slices    B(s, k+1), unless k is a sample's last slice; the same for I

    slices  the number of slices of every sample
    sizes   the tokens of each slice; None: as equal as possible, larger slices first
    """

    slices: int = 1
    sizes: tuple[int, ...] | None = None

    def needs(self, action: Action) -> tuple[Action, ...]:
        op, stage, k = action
        before = super().needs(action)
        if op == "F" and k % self.slices:
            before += (Action("F", stage, k - 1),)
        if op in "BI" and (k + 1) % self.slices:
            before += (Action(op, stage, k + 1),)
        return before

    def work(self) -> set[tuple[int, int]]:
        return set(product(range(self.num_stages), range(self.num_microbatches * self.slices)))

    def label(self, microbatch: int) -> str:
        if self.slices == 1:
            return str(microbatch)
        return f"{microbatch // self.slices}.{microbatch % self.slices}"


def terapipe(p: int, m: int, slices: int = 2, sizes: tuple[int, ...] | None = None) -> SlicedSchedule:
    """Return GPipe over slices: all m * slices forwards, then all backwards, each sample's last slice first.

    The bubble is (p-1)/(m * slices) of the ideal time for slices of equal cost. Every rank keeps m * slices units alive, as
    many tokens as in GPipe. With one slice it is GPipe. Raises ValueError if p, m or slices is below 1.
    Source: TeraPipe, arXiv:2102.07988, section 3.2.
    """
    require_positive(p=p, m=m, slices=slices)
    actions = tuple(tuple(_forwards(rank, m, slices) + _backwards(rank, m, slices)) for rank in range(p))
    return SlicedSchedule(actions, tuple(range(p)), m, "terapipe", slices, sizes)


def seq1f1b(p: int, m: int, slices: int = 2, sizes: tuple[int, ...] | None = None) -> SlicedSchedule:
    """Return 1F1B over s slices, with s-1 more warm-up forwards, since a sample's last slice runs backward first.

    The bubble is (p-1)/(m s) of the ideal time for slices of equal cost. Rank r keeps min(p - r + s - 1, m s) units alive,
    the tokens of (p - r + s - 1)/s microbatches; 1F1B keeps p - r microbatches. With one slice it is 1F1B.
    Raises ValueError if p, m or slices is below 1.
    Source: Seq1F1B, arXiv:2406.03488, section 3.2.
    """
    require_positive(p=p, m=m, slices=slices)
    actions = (
        alternate(p - 1 - rank + slices - 1, _forwards(rank, m, slices), _backwards(rank, m, slices))
        for rank in range(p)
    )
    return SlicedSchedule(tuple(map(tuple, actions)), tuple(range(p)), m, "seq1f1b", slices, sizes)


def _forwards(stage: int, m: int, slices: int) -> list[Action]:
    return [Action("F", stage, unit) for unit in range(m * slices)]


def _backwards(stage: int, m: int, slices: int) -> list[Action]:
    return [Action("B", stage, k * slices + n) for k in range(m) for n in reversed(range(slices))]


def slice_tokens(
    seq_len: int, slices: int, cost: SliceCost, p: int = 2, m: int = 1, multiple: int = 1
) -> tuple[int, ...]:
    """Cut a sample so that m samples pass through p stages in the least time; return each slice's number of tokens.

    minimises  m * (sum of the slices' costs) + (p-1) * (largest slice's cost)        by dynamic programming

    cost      (tokens before the slice, its tokens) -> seconds on a stage. A later slice attends to more keys, so it takes
              longer than an earlier slice with as many tokens
    multiple  every slice except the last has a multiple of this many tokens

    Tries several limits on the largest slice's cost, each in O(slices n^2) time with n = ceil(seq_len / multiple). It tries
    only one limit if the sum is the same however the sample is cut, as when a token costs a constant plus one unit per key.
    Raises ValueError if a sample has fewer than `slices` multiples.
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
    best: Cut = (math.inf, ())
    for largest in sorted({took for took in seconds.values() if took >= smallest}):
        if m * least + (p - 1) * largest >= best[0]:
            break
        total, sizes = _cut(ends, slices, seconds, operator.add, largest)
        best = min(best, (m * total + (p - 1) * largest, sizes))
    return best[1]


def _cut(
    ends: Sequence[int],
    slices: int,
    seconds: dict[tuple[int, int], float],
    join: Callable[[float, float], float],
    largest: float,
) -> Cut:
    """Return the cut of least total cost (join=add) or least maximum cost (join=max); no slice may cost over `largest`."""
    best: dict[int, Cut] = {0: (0.0, ())}  # end of the last slice -> the best cut of the tokens before it
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
