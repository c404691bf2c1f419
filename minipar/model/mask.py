"""Who sees whom, where queries and keys are any parts of a sequence in any order.

Every mask used here comes down to one rule: a query sees the keys whose index in the sequence lies in a range of its own,

    low <= index of the key < high       low   0, or where the query's document starts
                                         high  its own index + 1 if causal; never beyond the sequence's end

so a mask costs two numbers a query, and whole blocks of it are known to be empty or full from their least and greatest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TokenRun(NamedTuple):
    """Tokens start, start + step, ... of a sequence, `length` of them."""

    start: int
    length: int
    step: int = 1

    def before(self, end: int) -> TokenRun:
        """Those whose index is below `end`."""
        return self._replace(length=max(0, min(self.length, -(-(end - self.start) // self.step))))


class ScoreRegion(NamedTuple):
    """A rectangle of the scores of which everything is seen, or a square of which the lower triangle is."""

    rows: slice
    cols: slice
    triangle: bool


@dataclass(frozen=True)
class Mask:
    """What `queries` see of `keys`, each given as runs of one sequence.

    causal     a query sees no later token
    positions  None, or each query's place in its document, [T] or [B, T]: it sees its own document only, which
               started at its index minus its position
    end        the sequence's length, where tokens beyond it are padding that nobody sees

    Raises ValueError for documents that are not causal: where one ends, its positions do not say.
    """

    queries: tuple[TokenRun, ...]
    keys: tuple[TokenRun, ...]
    causal: bool = True
    positions: Tensor | None = None
    end: int | None = None

    def __post_init__(self):
        if self.positions is not None and not self.causal:
            raise ValueError("positions of documents are given with causal=False; use causal=True")

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Each query's (low, high), [T] or [B, T] int64, on the CPU: the loop over blocks asks them."""
        index = indices(self.queries)
        positions = None if self.positions is None else self.positions.cpu()
        low = torch.zeros_like(index) if positions is None else index - positions
        end = self.end if self.end is not None else 1 + max((_last(run) for run in self.keys), default=-1)
        high = (index + 1).clamp(max=end) if self.causal else torch.full_like(index, end)
        return low, high.expand_as(low)

    def count(self) -> int:
        """How many pairs of a query and a key it sees; with positions [B, T], of all B samples."""
        (low, high), keys = self.bounds(), indices(self.keys).sort().values
        seen = torch.searchsorted(keys, high.contiguous()) - torch.searchsorted(keys, low.contiguous())
        return int(seen.clamp(min=0).sum())

    def hidden(self) -> Tensor:
        """True where a query does not see a key, [T, S] or [B, 1, T, S]: for who has the room."""
        low, high = self.bounds()
        return _hidden(low, high, indices(self.keys))

    def tiles(self, side: int) -> Iterator[tuple[slice, list[tuple[slice, Tensor | None]]]]:
        """The blocks of `side` queries by `side` keys in which something is seen: for each tile of queries its keys'.

        With each comes what is hidden in it, [rows, cols] or [B, 1, rows, cols], or None where nothing is.
        """
        (low, high), keys = self.bounds(), indices(self.keys)
        cols = [(part, int(keys[part].min()), int(keys[part].max())) for part in _cuts(len(keys), side)]
        for rows in _cuts(low.shape[-1], side):
            some_low, some_high = low[..., rows], high[..., rows]
            least_low, most_low = int(some_low.min()), int(some_low.max())
            least_high, most_high = int(some_high.min()), int(some_high.max())
            found = []
            for part, first, last in cols:
                if last < least_low or first >= most_high:
                    continue
                whole = most_low <= first and last < least_high
                found.append((part, None if whole else _hidden(some_low, some_high, keys[part])))
            yield rows, found

    def regions(self) -> Iterator[ScoreRegion]:
        """The whole of what is seen, as rectangles and triangles: what a kernel without a mask can do.

        Raises ValueError for documents, and for runs of different steps.
        """
        if self.positions is not None:
            raise ValueError("documents do not come down to rectangles and triangles; use impl='tiled'")
        row = 0
        for query in self.queries:
            col = 0
            for key in self.keys:
                seen = key if self.end is None else key.before(self.end)
                for part in _regions(query, seen, self.causal):
                    yield ScoreRegion(_shift(part.rows, row), _shift(part.cols, col), part.triangle)
                col += key.length
            row += query.length


def whole_mask(num_queries: int, num_keys: int, causal: bool, positions: Tensor | None = None) -> Mask:
    """The mask of one process: the keys are the whole sequence, and the queries all of it or its last tokens."""
    return Mask((TokenRun(num_keys - num_queries, num_queries),), (TokenRun(0, num_keys),), causal, positions)


def indices(runs: tuple[TokenRun, ...]) -> Tensor:
    """The tokens of these runs, in order: int64 [sum of lengths]."""
    parts = [start + step * torch.arange(length) for start, length, step in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _last(run: TokenRun) -> int:
    return run.start + run.step * (run.length - 1) if run.length else -1


def _hidden(low: Tensor, high: Tensor, keys: Tensor) -> Tensor:
    hidden = (keys < low[..., None]) | (keys >= high[..., None])
    return hidden if hidden.dim() == 2 else hidden[:, None]


def _cuts(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _shift(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _regions(query: TokenRun, key: TokenRun, causal: bool) -> Iterator[ScoreRegion]:
    """Query i sees key j where j <= i + offset: nothing above a diagonal, which leaves at most three parts."""
    n, m = query.length, key.length
    if causal and query.step != key.step:
        raise ValueError(
            f"runs of steps {query.step} and {key.step} do not meet in triangles; use impl='tiled'"
        )
    offset = (query.start - key.start) // query.step if causal else m
    first = max(0, -offset)  # queries before this one see nothing
    full = min(m, max(0, offset))  # keys that all the others see
    corner = max(0, min(n - first, m - full))
    if first < n and full:
        yield ScoreRegion(slice(first, n), slice(0, full), False)
    if corner:
        yield ScoreRegion(slice(first, first + corner), slice(full, full + corner), True)
        if first + corner < n:
            yield ScoreRegion(slice(first + corner, n), slice(full, m), False)
