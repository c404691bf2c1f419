"""A mesh: the world's ranks as a grid, with one axis per kind of parallelism; an axis divides the ranks into groups.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp          lower case: coordinate along an axis; upper case: the axis's size

tp varies fastest: every layer waits for its messages, so its ranks should be neighbours in one machine. pp varies slowest:
it usually sends least. Ranks that differ only in dp and cp hold the same parameters: gradients are summed over both axes
together.

In the library: minipar.Mesh, which adds expert parallelism inside dp x cp, and any size without a table of ranks.
Source of the order: Megatron-LM on clusters, arXiv:2104.04473, section 3.2.
"""

import torch

AXES = ("pp", "dp", "cp", "tp")


def groups(*axes, pp=1, dp=1, cp=1, tp=1):
    """Return all groups of ranks that differ only along `axes`: groups("tp", dp=2, tp=2) -> [[0, 1], [2, 3]]."""
    sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp)
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    inside = [i for i, axis in enumerate(AXES) if axis in axes]
    outside = [i for i, axis in enumerate(AXES) if axis not in axes]
    num_members = torch.Size(sizes[axis] for axis in AXES if axis in axes).numel()
    return grid.permute(*outside, *inside).reshape(-1, num_members).tolist()


class Mesh:
    """This rank's groups. mesh.comm("tp") is the Comm of its tp group; over mesh.comm("dp", "cp") gradients are summed."""

    def __init__(self, world, pp=1, dp=1, cp=1, tp=1):
        self.world, self.sizes = world, dict(pp=pp, dp=dp, cp=cp, tp=tp)
        if pp * dp * cp * tp != world.size:
            raise ValueError(
                f"pp={pp} dp={dp} cp={cp} tp={tp} do not make {world.size} ranks; minipar.Mesh says what would"
            )
        at = torch.arange(world.size).view(pp, dp, cp, tp) == world.rank
        self.coordinates = dict(zip(AXES, at.nonzero()[0].tolist()))

    def comm(self, *axes):
        mine = next(g for g in groups(*axes, **self.sizes) if self.world.rank in g)
        return self.world.subgroup(mine, ".".join(axes))
