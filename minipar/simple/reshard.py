"""Resharding: read a matrix that one mesh saved in parts as the different parts of another mesh.

    saved    boxes of the [R, C] matrix, one per file: ((row, row_end), (column, column_end))
    wanted   a box; every element of it is in exactly one saved box

    saved, 2 x 1         wanted, 1 x 2        W is read in two pieces:
    +-----------+        +-----+-----+
    |  file 0   |        |     |     |        the right half of file 0, to the upper half of W
    +-----------+        |     |  W  |
    |  file 1   |        |     |     |        the right half of file 1, to the lower half of W
    +-----------+        +-----+-----+

The common region of two boxes is a box again, from the larger start to the smaller end along each dim. It is located in the
file relative to the saved box's start, in the result relative to the wanted box's. A rank opens only the files whose boxes
overlap its own, so each opens a few of them, not all.

In the library: minipar.train.checkpoint.restore.Checkpoint, plus flat shards (ZeRO), replicas, checksums;
minipar.mesh.overlap.
"""


def reshard(boxes, load, wanted):
    """Return the wanted box. boxes[i] is the box of the tensor load(i). Raises ValueError if no file has an element."""
    out, missing = None, area(wanted)
    for i, box in enumerate(boxes):
        common = overlap(box, wanted)
        if area(common) == 0:
            continue
        part = load(i)
        if out is None:
            out = part.new_empty([end - start for start, end in wanted])
        out[inside(wanted, common)] = part[inside(box, common)]
        missing -= area(common)
    if missing:
        raise ValueError(
            f"{missing} elements of {wanted} are in no file; minipar's Checkpoint names the tensor"
        )
    return out


def overlap(a, b):
    """Return the common region of two boxes. If there is none, one of the result's ends is before its start.

    saved as 2 x 1                 wanted: box W of a 1 x 2
    +---------+  rows 0-1, file 0  +----+----+                    from file 0: rows 0-1, columns 2-3, as W's rows 0-1
    +---------+                    |    | W  |
    +---------+  rows 2-3, file 1  |    |    |                    from file 1: rows 2-3, columns 2-3, as W's rows 2-3
    +---------+                    +----+----+"""
    return [(max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b)]


def area(box):
    (row, row_end), (column, column_end) = box
    return max(0, row_end - row) * max(0, column_end - column)


def inside(box, common):
    """The slices that select the region `common` from a tensor that holds `box`."""
    return tuple(slice(start - origin, end - origin) for (origin, _), (start, end) in zip(box, common))
