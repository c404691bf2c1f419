"""A mesh: the world's ranks as a grid, with one axis per kind of parallelism; an axis divides the ranks into groups.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp          lower case: coordinate along an axis; upper case: the axis's size

    pp=2, dp=2, tp=2:      pp=0               pp=1
                           tp=0  tp=1         tp=0  tp=1
                    dp=0     0     1            4     5        tp groups  [0 1] [2 3] [4 5] [6 7]
                    dp=1     2     3            6     7        dp groups  [0 2] [1 3] [4 6] [5 7]
                                                               pp groups  [0 4] [1 5] [2 6] [3 7]

tp varies fastest: every layer waits for its messages, so its ranks should be neighbours in one machine. pp varies slowest:
it usually sends least. Ranks that differ only in dp and cp hold the same parameters: gradients are summed over both axes
together.

In the library: minipar.Mesh, which adds expert parallelism inside dp x cp, and any size without a table of ranks.
Source of the order: Megatron-LM on clusters, arXiv:2104.04473, section 3.2.
"""

from itertools import product

import torch

AXES = ("pp", "dp", "cp", "tp")


def groups(*axes, pp=1, dp=1, cp=1, tp=1):
    """Return all groups of ranks that differ only along `axes`: groups("tp", dp=2, tp=2) -> [[0, 1], [2, 3]]."""
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    members = {}  # ranks with equal coordinates along the other axes form a group
    for place in product(range(pp), range(dp), range(cp), range(tp)):
        others = tuple(i for axis, i in zip(AXES, place) if axis not in axes)
        members.setdefault(others, []).append(int(grid[place]))
    return list(members.values())


class Mesh:
    """This rank's groups. mesh.comm("tp") is the Comm of its tp group; over mesh.comm("dp", "cp") gradients are summed."""

    def __init__(self, world, pp=1, dp=1, cp=1, tp=1):
        if pp * dp * cp * tp != world.size:
            raise ValueError(
                f"pp={pp} dp={dp} cp={cp} tp={tp} do not make {world.size} ranks; minipar.Mesh says what would"
            )
        self.world, self.sizes = world, dict(pp=pp, dp=dp, cp=cp, tp=tp)

    def comm(self, *axes):
        mine = next(group for group in groups(*axes, **self.sizes) if self.world.rank in group)
        return self.world.subgroup(mine, ".".join(axes))
