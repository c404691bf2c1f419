"""Specification of reading a block of a matrix that was saved in other blocks, opening only the files it needs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import torch

from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage
from minipar.spec.words import first, generator, mismatch, normal, wrong_entries

R, C = 12, 10
WHOLE = torch.arange(R * C, dtype=torch.float64).view(R, C) + 1

Box = tuple[tuple[int, int], tuple[int, int]]


def _grid(rows: list[int], columns: list[int]) -> list[Box]:
    """Return the boxes of the grid with these row and column edges."""
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


def _open(boxes: list[Box], opened: list[int], i: int) -> torch.Tensor:
    opened.append(i)
    return part_of(boxes[i])


def _right(reshard: Implementation, saved: str, wanted: str, files: bool = False) -> str | None:
    boxes = LAYOUTS[saved]
    for i, box in enumerate(LAYOUTS[wanted]):
        opened: list[int] = []
        got = reshard(list(boxes), partial(_open, boxes, opened), box)
        what = f"saved as {saved}, read as {wanted}: part {i}, rows and columns {box},"
        if words := mismatch(what, got, part_of(box)):
            return words
        needed = [i for i, other in enumerate(boxes) if _meet(other, box)]
        if files and sorted(opened) != needed:
            return f"{what} opened the files {opened}; the elements are in {needed}"
    return None


def _each(reshard: Implementation, files: bool) -> str | None:
    return first(_right(reshard, *pair, files) for pair in product(LAYOUTS, LAYOUTS))


def _varied(reshard: Implementation) -> str | None:
    """Check other values, dtypes, strides, sizes and orders of files, and that the files' tensors are not written to."""
    draw = generator(3)
    whole = normal(draw, 5 * R, 5 * C)
    not_finite = whole.clone()
    not_finite[::3], not_finite[1::3] = torch.nan, torch.inf
    huge = torch.randint(2**58, 2**59, whole.shape, generator=draw)
    matrices = {
        "in float64, thousands of elements": whole,
        "in float64, of other values": normal(draw, 5 * R, 5 * C),
        "in float32": whole.float(),
        "in bfloat16": whole.bfloat16(),
        "in int64, huge": huge,
        "not finite": not_finite,
        "not contiguous": whole.t().contiguous().t(),
    }
    edges = [0, 5, 35, 5 * R], [0, 15, 20, 5 * C]
    files = _grid(*edges)
    boxes = [files[i] for i in (4, 8, 0, 6, 2, 1, 7, 3, 5)]
    wanted = [((0, 5 * R), (0, 5 * C)), ((4, 5), (3, 41)), ((5, 35), (15, 20)), ((59, 60), (49, 50))]
    for words, matrix in matrices.items():
        parts = [matrix[slice(*rows), slice(*columns)] for rows, columns in boxes]
        if words != "not contiguous":
            parts = [part.contiguous() for part in parts]
        before = [part.clone() for part in parts]
        for box in wanted:
            rows, columns = box
            got = reshard(list(boxes), parts.__getitem__, box)
            what = f"a matrix {words}, in 9 files: rows and columns {box},"
            if wrong := mismatch(what, got, matrix[slice(*rows), slice(*columns)], rtol=0.0):
                return wrong
        for box, now, was in zip(boxes, parts, before):
            if wrong_entries(now, was).any():
                return f"a matrix {words}: the tensor of the file with rows and columns {box} was written to"
    return None


def _refuses(reshard: Implementation) -> str | None:
    for what, boxes in {
        "rows 4 to 8": [ROWS[0], ROWS[2]],
        "columns 3 and 4": _grid([0, R], [0, 3]) + _grid([0, R], [5, C]),
        "a corner": [BLOCKS[0], BLOCKS[1], BLOCKS[2]],
    }.items():
        try:
            reshard(list(boxes), partial(_open, boxes, []), ((0, R), (0, C)))
        except ValueError:
            continue
        return f"{what}: in no file, and it returned a matrix all the same; raise a ValueError"
    return None


SPECIFICATIONS = [
    Specification(
        "reshard",
        "reshard(boxes, load, wanted)",
        "The wanted box of a matrix that was saved as these boxes, opening only the files that meet it.",
        (
            Stage("runs", partial(_right, saved="one file", wanted="one file"), ()),
            Stage("small", partial(_right, saved="rows", wanted="columns"), ()),
            Stage("drawn", partial(_each, files=False), ()),
            Stage("bytes", partial(_each, files=True), ()),
            Stage("varied", _varied, ()),
            Stage("refusals", _refuses, ()),
        ),
    )
]
