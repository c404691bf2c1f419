"""Seq1F1B: the tokens of a sample pass through the stages in slices, one after another.

With causal attention, a slice needs no later tokens. So m microbatches of s slices are m * s units of work, and ranks idle
as little as with m * s microbatches. A slice attends to the keys and values of the earlier slices, which each stage keeps.
So a sample's slices run forward in ascending order, and backward in descending order.

TeraPipe, which came first, is GPipe over slices: it idles as long, and keeps all m * s units alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from minipar.schedules.one_f_one_b import alternate
from minipar.schedules.schedule import Action, Schedule
from minipar.support.errors import require_positive

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
        return f"{microbatch // self.slices}.{microbatch % self.slices}"


def seq1f1b(p: int, m: int, slices: int = 2, sizes: tuple[int, ...] | None = None) -> SlicedSchedule:
    """Return 1F1B over s slices, with s-1 more warm-up forwards, since a sample's last slice runs backward first.

    The bubble is (p-1)/(m s) of the ideal time for slices of equal cost. Rank r keeps min(p - r + s - 1, m s) units alive,
    the tokens of (p - r + s - 1)/s microbatches; 1F1B keeps p - r microbatches. With one slice it is 1F1B.
    Raises ValueError if p, m or slices is below 1.
    Source: Seq1F1B, arXiv:2406.03488, section 3.2.
    """
    require_positive(p=p, m=m, slices=slices)
    numbers = [k * slices + n for k in range(m) for n in reversed(range(slices))]
    actions = (
        alternate(
            p - 1 - rank + slices - 1,
            [Action("F", rank, unit) for unit in range(m * slices)],
            [Action("B", rank, unit) for unit in numbers],
        )
        for rank in range(p)
    )
    return SlicedSchedule(tuple(map(tuple, actions)), tuple(range(p)), m, "seq1f1b", slices, sizes)


def slice_tokens(seq_len: int, slices: int, cost: SliceCost, multiple: int = 1) -> tuple[int, ...]:
    """Cut a sample so that its most expensive slice costs the least; return each slice's number of tokens.

    cost      (tokens before the slice, its tokens) -> seconds on a stage. A later slice attends to more keys, so it takes
              longer than an earlier slice with as many tokens
    multiple  every slice except the last has a multiple of this many tokens

    With p stages and m samples, a step takes m times the sum of the slices' costs, and p-1 times the largest. If a token
    costs a constant plus one unit per key, the sum is the same however the sample is cut, so this cut is the fastest.
    Tries several limits on the cost, each in O(slices n) time with n = ceil(seq_len / multiple): the last slice is as long
    as the limit lets it be, then the one before it. A slice must cost at least as much as any part of it.
    Raises ValueError if a sample has fewer than `slices` multiples.
    Source: TeraPipe, arXiv:2102.07988, section 3.3, which cuts by dynamic programming.
    """
    require_positive(seq_len=seq_len, slices=slices, multiple=multiple)
    ends = [*range(0, seq_len, multiple), seq_len]
    if len(ends) <= slices:
        whole = f" in multiples of {multiple}" if multiple > 1 else ""
        raise ValueError(
            f"slices={slices} are more than seq_len={seq_len} has tokens{whole}; use {len(ends) - 1} or fewer"
        )

    def cut(limit: float) -> list[int] | None:
        """Return where slices begin, and the sample's end, if no slice costs more than `limit`; None if that cannot be."""
        places = [len(ends) - 1]
        for earlier in reversed(range(slices)):
            end = places[0]
            fits = (i for i in range(earlier, end) if cost(ends[i], ends[end] - ends[i]) <= limit)
            start = next(fits, None)
            if start is None:
                return None
            places.insert(0, start)
        return None if places[0] else [ends[i] for i in places]

    limits = sorted({cost(a, b - a) for a, b in combinations(ends, 2)})
    least = bisect_left(limits, True, key=lambda limit: cut(limit) is not None)
    places = cut(limits[least])
    assert places is not None, "the whole sample's cost is a limit that every cut keeps"
    return tuple(b - a for a, b in pairwise(places))
