"""Specification of a mesh's groups: tp varies fastest, pp slowest; every rank is in one group per axis."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product

from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage

AXES = ("pp", "dp", "cp", "tp")
AXES_OF_GROUPS = [*(subset for n in range(5) for subset in combinations(AXES, n)), ("tp", "dp")]


def _group_of(rank: int, axes: tuple[str, ...], sizes: dict[str, int]) -> list[int]:
    """Return the group of `rank` along `axes`, by the formula rank = ((pp DP + dp) CP + cp) TP + tp."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= sizes[axis]
    free = [range(sizes[a]) if a in axes else (rank // strides[a] % sizes[a],) for a in AXES]
    return [sum(i * strides[a] for i, a in zip(at, AXES)) for at in product(*free)]


def _right(groups: Implementation, axes: tuple[str, ...], sizes: dict[str, int]) -> str | None:
    try:
        got = [list(group) for group in groups(*axes, **sizes)]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        return f"groups{axes} of {sizes} raised {type(error).__name__}: {error}"
    world = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    for rank in range(world):
        mine = [group for group in got if rank in group]
        if len(mine) != 1:
            return f"groups{axes} of {sizes}: rank {rank} is in {len(mine)} groups; it should be in one"
        want = _group_of(rank, axes, sizes)
        if sorted(mine[0]) != want:
            return f"groups{axes} of {sizes}: rank {rank} is with {sorted(mine[0])}; it should be with {want}"
    return None


def _drawn(groups: Implementation) -> str | None:
    for pp, dp, cp, tp in product((1, 2, 3), (1, 2), (1, 2), (1, 2, 4)):
        for axes in AXES_OF_GROUPS:
            if words := _right(groups, axes, dict(pp=pp, dp=dp, cp=cp, tp=tp)):
                return words
    return None


SPECIFICATIONS = [
    Specification(
        "mesh",
        'groups(*axes, pp=1, dp=1, cp=1, tp=1) -> lists of ranks; groups("tp", dp=2, tp=2) -> [[0, 1], [2, 3]]',
        "All groups of ranks that differ along these axes alone; rank = ((pp DP + dp) CP + cp) TP + tp. "
        "The order inside a group, and of groups, is not asked for.",
        (
            Stage("runs", partial(_right, axes=("tp",), sizes=dict(pp=1, dp=1, cp=1, tp=1)), ()),
            Stage("small", partial(_right, axes=("tp",), sizes=dict(pp=1, dp=2, cp=1, tp=2)), ()),
            Stage("drawn", _drawn, ()),
        ),
    )
]
