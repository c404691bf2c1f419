"""Wrong and unusual meshes, and matrices read as other parts."""

import torch

from minipar.simple import mesh, reshard
from tests.spec.wrong.generic import nan_as_zero

groups, read = mesh.groups, reshard.reshard


def swapped(a, b):
    """Two axes change their places in the order of ranks."""

    def wrong(*axes, pp=1, dp=1, cp=1, tp=1):
        sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp)
        order = [{a: b, b: a}.get(x, x) for x in ("pp", "dp", "cp", "tp")]
        grid = torch.arange(pp * dp * cp * tp).view([sizes[x] for x in order])
        others = [i for i, x in enumerate(order) if x not in axes]
        mine = [i for i, x in enumerate(order) if x in axes]
        size = 1
        for i in mine:
            size *= grid.shape[i]
        return grid.permute(*others, *mine).reshape(-1, size).tolist()

    return wrong


def grouped(change, when=lambda axes, sizes: True):
    def wrong(*axes, **sizes):
        right = groups(*axes, **sizes)
        return change(right) if when(axes, sizes) else right

    return wrong


def world(sizes):
    n = 1
    for size in sizes.values():
        n *= size
    return n


def first_axis_only(*axes, **sizes):
    return groups(*axes[:1], **sizes)


def in_the_order_of_axes(*axes, pp=1, dp=1, cp=1, tp=1):
    """The ranks of a group stand in the order in which the axes are named."""
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    names = ["pp", "dp", "cp", "tp"]
    mine = [names.index(a) for a in axes]
    others = [i for i in range(4) if i not in mine]
    size = 1
    for i in mine:
        size *= grid.shape[i]
    return grid.permute(*others, *mine).reshape(-1, size).tolist()


def stale_groups():
    kept = {}
    return lambda *axes, **sizes: kept.setdefault((axes, world(sizes)), groups(*axes, **sizes))


def without_alone(*axes, **sizes):
    """A rank that is alone is in no group."""
    return [group for group in groups(*axes, **sizes) if len(group) > 1]


def by_arithmetic(*axes, pp=1, dp=1, cp=1, tp=1):
    """Right: without a grid, groups in another order."""
    sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp)
    found = {}
    for rank in range(pp * dp * cp * tp):
        rest, place = rank, {}
        for axis in ("tp", "cp", "dp", "pp"):
            rest, place[axis] = divmod(rest, sizes[axis])
        found.setdefault(tuple(n for a, n in place.items() if a not in axes), []).append(rank)
    return sorted(found.values(), reverse=True)


# Reshard --------------------------------------------------------------------------------


def loaded(change):
    return lambda boxes, load, wanted: read(boxes, lambda i: change(load(i)), wanted)


def result(change):
    return lambda boxes, load, wanted: change(read(boxes, load, wanted), boxes, wanted)


def opens_all(boxes, load, wanted):
    parts = [load(i) for i in range(len(boxes))]
    return read(boxes, parts.__getitem__, wanted)


def opens_twice(boxes, load, wanted):
    read(boxes, load, wanted)
    return read(boxes, load, wanted)


def fills_with_zeros(boxes, load, wanted):
    out = None
    for i, box in enumerate(boxes):
        common = reshard.overlap(box, wanted)
        if reshard.area(common):
            part = load(i)
            out = part.new_zeros([end - start for start, end in wanted]) if out is None else out
            out[reshard.inside(wanted, common)] = part[reshard.inside(box, common)]
    if out is None:
        raise ValueError("nothing is there")
    return out


def raises_key_error(boxes, load, wanted):
    try:
        return read(boxes, load, wanted)
    except ValueError as error:
        raise KeyError(str(error)) from None


def sorted_boxes(boxes, load, wanted):
    """The files' order is taken for that of their boxes."""
    return read(sorted(boxes), load, wanted)


def from_the_files_start(boxes, load, wanted):
    """The part is taken from the file's own start."""
    out = None
    for i, box in enumerate(boxes):
        common = reshard.overlap(box, wanted)
        if reshard.area(common):
            part = load(i)
            out = part.new_empty([end - start for start, end in wanted]) if out is None else out
            rows, columns = (end - start for start, end in common)
            out[reshard.inside(wanted, common)] = part[:rows, :columns]
    if out is None:
        raise ValueError("missing")
    return out


def ignores_part_strides(part):
    return part if part.is_contiguous() else part.as_strided(part.shape, torch.empty(part.shape).stride())


def whole_matrix():
    """The first matrix that was read."""
    kept = {}

    def wrong(boxes, load, wanted):
        return kept.setdefault((tuple(boxes), tuple(wanted)), read(boxes, load, wanted))

    return wrong


def a_file_itself(boxes, load, wanted):
    """Where a box is wanted as it was saved, the file's own memory; then written to."""
    for i, box in enumerate(boxes):
        if tuple(map(tuple, box)) == tuple(map(tuple, wanted)):
            part = load(i)
            y = part.clone()
            part.zero_()
            return y
    return read(boxes, load, wanted)


def at_most_eight_files(boxes, load, wanted):
    if len(boxes) > 4:
        return read(boxes[:-1], load, wanted)
    return read(boxes, load, wanted)


def row_by_row(boxes, load, wanted):
    """Right: element ranges, a row at a time, files from the last to the first."""
    (row, row_end), (column, column_end) = wanted
    out, done = None, torch.zeros(row_end - row, column_end - column, dtype=torch.bool)
    for i in reversed(range(len(boxes))):
        (r, r_end), (c, c_end) = boxes[i]
        rows = range(max(r, row), min(r_end, row_end))
        left, right = max(c, column), min(c_end, column_end)
        if not rows or left >= right:
            continue
        part = load(i)
        out = part.new_empty(done.shape) if out is None else out
        for n in rows:
            out[n - row, left - column : right - column] = part[n - r, left - c : right - c]
            done[n - row, left - column : right - column] = True
    if not done.all():
        raise ValueError("elements are in no file")
    return out


WRONG = {
    "mesh": {
        "dp and tp swapped": swapped("dp", "tp"),
        "dp and cp swapped": swapped("dp", "cp"),
        "the first axis alone": first_axis_only,
        "the last group is missing": grouped(lambda g: g[:-1]),
        "the last group is missing from 16 ranks on": grouped(
            lambda g: g[:-1], lambda axes, sizes: world(sizes) >= 16
        ),
        "groups of one are missing": without_alone,
        "of the first mesh of this size": stale_groups(),
        "a rank one further": grouped(lambda g: [[r + 1 for r in group] for group in g]),
        "wrong with three axes": grouped(
            lambda g: g[::-1] and [sorted(sum(g, []))], lambda axes, sizes: len(axes) == 3
        ),
        "wrong for odd sizes": grouped(
            lambda g: g[:-1], lambda axes, sizes: any(n % 2 and n > 1 for n in sizes.values())
        ),
        "wrong without axes": grouped(lambda g: [sorted(sum(g, []))], lambda axes, sizes: not axes),
    },
    "reshard": {
        "float64 as float32": loaded(lambda part: part.float().to(part.dtype)),
        "wrong in bfloat16": loaded(lambda part: part * 2 if part.dtype == torch.bfloat16 else part),
        "integers through float32": loaded(
            lambda part: part if part.is_floating_point() else part.float().to(part.dtype)
        ),
        "nan is zero": loaded(lambda part: nan_as_zero(part) if part.is_floating_point() else part),
        "ignores strides": loaded(ignores_part_strides),
        "zero from 1,000 elements on": result(lambda y, boxes, wanted: y if y.numel() < 1000 else y * 0),
        "wrong from five files on": at_most_eight_files,
        "opens all files": opens_all,
        "opens files twice": opens_twice,
        "fills with zeros": fills_with_zeros,
        "a KeyError": raises_key_error,
        "files in the order of boxes": sorted_boxes,
        "from the file's start": from_the_files_start,
        "the first matrix read": whole_matrix(),
        "writes to a file's tensor": a_file_itself,
    },
}
RIGHT = {
    "mesh": {
        "by arithmetic": by_arithmetic,
        "ranks in the order of the axes' names": in_the_order_of_axes,
        "ranks in reverse": grouped(lambda g: [group[::-1] for group in g]),
    },
    "reshard": {"row by row": row_by_row},
}
