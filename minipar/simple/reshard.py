"""Reading a matrix that was saved in parts, as other parts: a checkpoint of one mesh, read by another.

    saved    boxes of the [R, C] matrix, one per file: ((row, row_end), (column, column_end))
    wanted   a box; every element of it is in exactly one saved box

The common region of two boxes is a box again, from the larger start to the smaller end along each dim. It is located in the
file relative to the saved box's start, in the result relative to the wanted box's. A rank opens only the files whose boxes
meet its own: when p ranks are read by other p, each opens few of them, not all.

In the library: minipar.train.restore.Checkpoint, plus flat shards (ZeRO), replicas, checksums; minipar.mesh.overlap.
"""


def reshard(boxes, load, wanted):
    """Return the wanted box. boxes[i] is that of the tensor load(i). Raises ValueError where no file has an element."""
    out, missing = None, _area(wanted)
    for i, box in enumerate(boxes):
        common = [(max(a, b), min(a_end, b_end)) for (a, a_end), (b, b_end) in zip(box, wanted)]
        if not _area(common):
            continue
        part = load(i)
        out = part.new_empty([end - start for start, end in wanted]) if out is None else out
        out[_inside(wanted, common)] = part[_inside(box, common)]
        missing -= _area(common)
    if missing:
        raise ValueError(
            f"{missing} elements of {wanted} are in no file; minipar's Checkpoint names the tensor"
        )
    return out


def _area(box):
    (row, row_end), (column, column_end) = box
    return max(0, row_end - row) * max(0, column_end - column)


def _inside(box, common):
    """The slices that select the region `common` from a tensor that holds `box`."""
    return tuple(slice(start - origin, end - origin) for (origin, _), (start, end) in zip(box, common))
