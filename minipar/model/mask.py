"""Attention masks for queries and keys that are any parts of a sequence, in any order.

Every mask used here follows one rule: a query sees the keys whose index in the sequence lies in the query's own range,

    low <= index of the key < high       low   0, or the start of the query's document
                                         high  the query's index + 1 if causal; never beyond the sequence's end

so a mask costs two numbers per query. The minimum and maximum of low and high over a block of queries tell whether a tile
is wholly hidden or wholly visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TokenRun(NamedTuple):
    """A run of `length` tokens of a sequence: start, start + step, ..."""

    start: int
    length: int
    step: int = 1

    def before(self, end: int) -> TokenRun:
        """Return the run of this run's tokens that have an index below `end`."""
        return self._replace(length=max(0, min(self.length, -(-(end - self.start) // self.step))))


class ScoreRegion(NamedTuple):
    """A region of the score matrix: a fully visible rectangle, or a square of which only the lower triangle is visible."""

    rows: slice
    cols: slice
    is_causal: bool


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees, where `queries` and `keys` are runs of one sequence.

    causal     a query sees no later token
    positions  None, or each query's position in its document, [T] or [B, T]. A query sees only its own document, which
               starts at the query's index minus its position
    end        None, or the sequence's length: tokens from there on are padding, which no query sees

    Raises ValueError for positions without causal: positions do not tell where a document ends.
    """

    queries: tuple[TokenRun, ...]
    keys: tuple[TokenRun, ...]
    causal: bool = True
    positions: Tensor | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.positions is not None and not self.causal:
            raise ValueError("positions of documents are given with causal=False; use causal=True")

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return each query's (low, high), [T] or [B, T] int64, on the CPU, because the loop over tiles runs there."""
        index = indices(self.queries)
        positions = None if self.positions is None else self.positions.cpu()
        low = torch.zeros_like(index) if positions is None else index - positions
        end = self.end if self.end is not None else 1 + max((_last(run) for run in self.keys), default=-1)
        high = (index + 1).clamp(max=end) if self.causal else torch.full_like(index, end)
        return low, high.expand_as(low)

    def count(self) -> int:
        """Count the visible pairs of a query and a key; with positions [B, T], over all B samples."""
        (low, high), keys = self.bounds(), indices(self.keys).sort().values
        seen = torch.searchsorted(keys, high.contiguous()) - torch.searchsorted(keys, low.contiguous())
        return int(seen.clamp(min=0).sum())

    def hidden(self) -> Tensor:
        """Return the dense mask, [T, S] or [B, 1, T, S], True where a query does not see a key; takes O(T S) memory."""
        low, high = self.bounds()
        return _hidden(low, high, indices(self.keys))

    def tiles(self, side: int) -> Iterator[tuple[slice, list[tuple[slice, Tensor | None]]]]:
        """Yield each tile of `side` queries with the tiles of `side` keys in which at least one score is visible.

        Each tile of keys comes with its dense mask, [rows, cols] or [B, 1, rows, cols], or None if nothing is hidden.
        """
        (low, high), keys = self.bounds(), indices(self.keys)
        cols = [(part, int(keys[part].min()), int(keys[part].max())) for part in _slices(len(keys), side)]
        for rows in _slices(low.shape[-1], side):
            tile_low, tile_high = low[..., rows], high[..., rows]
            least_low, most_low = int(tile_low.min()), int(tile_low.max())
            least_high, most_high = int(tile_high.min()), int(tile_high.max())
            found = []
            for part, first, last in cols:
                if last < least_low or first >= most_high:
                    continue
                whole = most_low <= first and last < least_high
                found.append((part, None if whole else _hidden(tile_low, tile_high, keys[part])))
            yield rows, found

    def regions(self) -> Iterator[ScoreRegion]:
        """Yield the visible scores as rectangles and triangles, which a kernel can compute without a dense mask.

        Raises ValueError for documents, and for causal runs of different steps.
        """
        if self.positions is not None:
            raise ValueError("documents do not come down to rectangles and triangles; use impl='tiled'")
        row = 0
        for query in self.queries:
            col = 0
            for key in self.keys:
                seen = key if self.end is None else key.before(self.end)
                for part in _regions(query, seen, self.causal):
                    yield ScoreRegion(_shift(part.rows, row), _shift(part.cols, col), part.is_causal)
                col += key.length
            row += query.length


def single_process_mask(
    num_queries: int, num_keys: int, causal: bool, positions: Tensor | None = None
) -> Mask:
    """Return the mask for keys that are the whole sequence and queries that are its last tokens, or all of them."""
    return Mask((TokenRun(num_keys - num_queries, num_queries),), (TokenRun(0, num_keys),), causal, positions)


def indices(runs: tuple[TokenRun, ...]) -> Tensor:
    """Return the token indices of these runs, in order: int64 [sum of lengths]."""
    parts = [start + step * torch.arange(length) for start, length, step in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _last(run: TokenRun) -> int:
    return run.start + run.step * (run.length - 1) if run.length else -1


def _hidden(low: Tensor, high: Tensor, keys: Tensor) -> Tensor:
    hidden = (keys < low[..., None]) | (keys >= high[..., None])
    return hidden if hidden.dim() == 2 else hidden[:, None]


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _shift(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _regions(query: TokenRun, key: TokenRun, causal: bool) -> Iterator[ScoreRegion]:
    """Split a pair of runs into at most three regions; with `causal`, query i sees key j where j <= i + offset."""
    n, m = query.length, key.length
    if causal and query.step != key.step:
        raise ValueError(
            f"runs of steps {query.step} and {key.step} do not meet in triangles; use impl='tiled'"
        )
    offset = (query.start - key.start) // query.step if causal else m
    first = max(0, -offset)  # queries before this one see nothing
    full = min(m, max(0, offset))  # keys that every query from `first` on sees
    corner = max(0, min(n - first, m - full))
    if first < n and full:
        yield ScoreRegion(slice(first, n), slice(0, full), False)
    if corner:
        yield ScoreRegion(slice(first, first + corner), slice(full, full + corner), True)
        if first + corner < n:
            yield ScoreRegion(slice(first + corner, n), slice(full, m), False)
