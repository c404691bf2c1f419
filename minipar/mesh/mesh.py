"""Mesh: the coordinates of every rank, and its group along each axis.

Adds to `simple/mesh.py`: expert parallelism inside dp x cp, and a mesh of any size without a table of ranks.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp          pp slowest, tp fastest

tp is fastest because its messages are on the critical path of every layer, so its ranks should be on one
node; pp is slowest because it sends least.

Expert parallelism subdivides dp x cp: with i = dp * CP + cp, a rank has ep = i % EP and edp = i // EP. An ep
group is EP consecutive values of i with the same pp and tp, and holds every expert once; an edp group holds
the replicas of the same experts. So there are two grids over the same ranks: (pp, dp, cp, tp) and
(pp, edp, ep, tp). A group may combine axes of one grid, not of both.

Every axis has a size and a stride: coordinate = rank // stride % size, rank = sum of coordinate * stride. No
table of ranks is built, so arithmetic on a mesh of any size is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, cast

from minipar.config.mesh_rules import check_mesh
from minipar.support.errors import one_of

if TYPE_CHECKING:  # a mesh without a Comm needs no torch
    from minipar.comm import Comm

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "tp")

# The groups that strategies use, created with the mesh: NCCL hangs unless all ranks create them in the same order.
_GROUPS = (
    ("pp",),
    ("dp",),
    ("cp",),
    ("tp",),
    ("ep",),
    ("edp",),
    ("dp", "cp"),  # ranks with the same dense parameters: their gradients are summed
    ("pp", "tp"),  # ranks that together hold one replica of the dense parameters
    ("pp", "dp", "cp", "tp"),  # all ranks
)


class Coordinates(NamedTuple):
    """The coordinates of a rank in both grids, (pp, dp, cp, tp) and (pp, edp, ep, tp)."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    edp: int


class Mesh:
    """The world's ranks arranged along pp, dp, cp and tp, with ep inside dp x cp.

    world        a Comm, or the number of ranks, for arithmetic without communication
    sizes        {"pp", "dp", "cp", "tp", "ep", "edp"} -> number of ranks along that axis
    coordinates  the coordinates of this rank (needs a Comm)

    Raises ValueError if a size is not a positive int, pp*dp*cp*tp is not the world's size, or ep does not divide dp*cp.
    """

    def __init__(
        self,
        world: Comm | int,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
    ):
        # A caller without a type checker may give anything; check_mesh checks whatever is not a Comm as a number.
        self.world: Comm | None = cast("Comm", world) if hasattr(world, "subgroup") else None
        self.world_size = cast(int, world) if self.world is None else self.world.size
        check_mesh(self.world_size, pp, dp, cp, tp, ep)
        self.sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, edp=dp * cp // ep)
        self._strides = dict(pp=dp * cp * tp, dp=cp * tp, cp=tp, tp=1, ep=tp, edp=ep * tp)
        self._comms: dict[tuple[str, ...], Comm] = {}
        if self.world is not None:
            for axes in _GROUPS:
                self.comm(*axes)

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{a}={self.sizes[a]}" for a in (*DENSE, "ep")) + ")"

    def stride(self, axis: str) -> int:
        """Return the distance, in ranks, between neighbours along this axis."""
        return self._strides[axis]

    @property
    def coordinates(self) -> Coordinates:
        return self.coordinates_of(self._require_comm().rank)

    def coordinates_of(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank={rank} is not in a world of {self.world_size}; use 0 to {self.world_size - 1}"
            )
        return Coordinates(*(rank // self._strides[a] % self.sizes[a] for a in Coordinates._fields))

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at the given coordinates; missing coordinates are 0. Inverse of coordinates_of.

        Give dp and cp, or edp and ep, or all four if they agree. Raises ValueError if they disagree.
        """
        _require_known(coordinates)
        for axis, at in coordinates.items():
            if not 0 <= at < self.sizes[axis]:
                raise ValueError(f"{axis}={at} is outside the mesh; use 0 to {self.sizes[axis] - 1}")
        grid = DENSE if {"dp", "cp"} & coordinates.keys() else EXPERT
        rank = sum(coordinates.get(axis, 0) * self._strides[axis] for axis in grid)
        actual = self.coordinates_of(rank)._asdict()
        for axis, at in coordinates.items():
            if actual[axis] != at:
                raise ValueError(f"{axis}={at} disagrees with dp and cp, which give {axis}={actual[axis]}")
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return, ascending, the ranks that differ from `rank` only along these axes (given in any order)."""
        coordinates = self.coordinates_of(rank)
        ranks = [rank]
        for axis in _in_grid_order(axes):  # slowest first, so that the ranks stay ascending
            size, stride = self.sizes[axis], self._strides[axis]
            first = getattr(coordinates, axis) * stride
            ranks = [r - first + i * stride for r in ranks for i in range(size)]
        return tuple(ranks)

    def comm(self, *axes: str) -> Comm:
        """Return the Comm of this rank's group along these axes (in any order); the same object each time.

        The groups of _GROUPS are created with the mesh, any other group on first use. On gloo creating a group is free; on
        NCCL it is a collective, which all its ranks must enter in the same order.
        """
        world = self._require_comm()
        axes = _in_grid_order(axes)
        if axes not in self._comms:
            self._comms[axes] = world.subgroup(self.group(world.rank, *axes), ".".join(axes) or "self")
        return self._comms[axes]

    def _require_comm(self) -> Comm:
        if self.world is None:
            raise ValueError(
                f"{self!r} was built from a number of ranks, {self.world_size}; build it from a Comm"
            )
        return self.world


def _in_grid_order(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes in the order of their grid, slowest first."""
    _require_known(axes)
    for grid in (DENSE, EXPERT):
        if set(axes) <= set(grid):
            return tuple(a for a in grid if a in axes)
    raise ValueError(f"axes={tuple(axes)} mix two grids; use axes of {DENSE} or of {EXPERT}")


def _require_known(axes: Iterable[str]) -> None:
    for axis in axes:
        if axis not in Coordinates._fields:
            raise ValueError(f"axis={axis!r} is not of a mesh; use {one_of(Coordinates._fields)}")
