"""Specification of reading a matrix that was saved in other parts: the right elements, only the files that have them."""

from __future__ import annotations

from itertools import pairwise, product

import torch

from minipar.spec.specification import Specification, Stage, on_one_rank
from minipar.spec.words import differs

R, C = 12, 10
WHOLE = torch.arange(R * C, dtype=torch.float64).view(R, C) + 1

Box = tuple[tuple[int, int], tuple[int, int]]


def _grid(rows: list[int], columns: list[int]) -> list[Box]:
    """Return the boxes between these edges."""
    return list(product(pairwise(rows), pairwise(columns)))


ROWS, COLUMNS = _grid([0, 4, 8, R], [0, C]), _grid([0, R], [0, 5, C])
BLOCKS, UNEVEN = _grid([0, 6, R], [0, 5, C]), _grid([0, 1, 7, R], [0, 3, 4, C])
LAYOUTS = {
    "rows": ROWS,
    "columns": COLUMNS,
    "blocks": BLOCKS,
    "uneven blocks": UNEVEN,
    "one file": _grid([0, R], [0, C]),
}


def part_of(box: Box) -> torch.Tensor:
    (row, row_end), (column, column_end) = box
    return WHOLE[row:row_end, column:column_end].clone()


def _meet(a: Box, b: Box) -> bool:
    return all(max(start, first) < min(end, last) for (start, end), (first, last) in zip(a, b))


def _right(reshard, saved: str, wanted: str, files: bool = False) -> str | None:
    boxes = LAYOUTS[saved]
    for i, box in enumerate(LAYOUTS[wanted]):
        opened: list[int] = []
        got = reshard(list(boxes), lambda i: opened.append(i) or part_of(boxes[i]), box)  # noqa: B023
        what = f"saved as {saved}, read as {wanted}: part {i}, rows and columns {box},"
        if words := differs(what, got, part_of(box)):
            return words
        needed = [i for i, other in enumerate(boxes) if _meet(other, box)]
        if files and sorted(opened) != needed:
            return f"{what} opened the files {opened}; the elements are in {needed}"
    return None


def _drawn(reshard) -> str | None:
    return next(filter(None, (_right(reshard, *pair) for pair in product(LAYOUTS, LAYOUTS))), None)


def _files(reshard) -> str | None:
    return next(filter(None, (_right(reshard, *pair, True) for pair in product(LAYOUTS, LAYOUTS))), None)


def _refuses(reshard) -> str | None:
    boxes = [ROWS[0], ROWS[2]]
    try:
        reshard(boxes, lambda i: part_of(boxes[i]), ((0, R), (0, C)))
    except ValueError:
        return None
    return "rows 4 to 8 are in no file, and it returned a matrix all the same; raise a ValueError"


SPECIFICATIONS = [
    Specification(
        "reshard",
        "reshard(boxes, load, wanted)",
        "The wanted box of a matrix that was saved as these boxes, opening only the files that meet it.",
        (
            Stage("runs", lambda f: on_one_rank(_right, f, "one file", "one file")),
            Stage("small", lambda f: on_one_rank(_right, f, "rows", "columns")),
            Stage("drawn", lambda f: on_one_rank(_drawn, f)),
            Stage("bytes", lambda f: on_one_rank(_files, f)),
            Stage("refusals", lambda f: on_one_rank(_refuses, f)),
        ),
    )
]
