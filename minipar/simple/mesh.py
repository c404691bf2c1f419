"""A mesh: the world's ranks as a grid, one axis per kind of parallelism, and a Comm for each rank's line along each axis.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp

tp is fastest: its messages hold up every layer, so its ranks should be neighbours in one machine. pp is slowest: it sends
least. Ranks that differ in dp and cp alone hold the same parameters: gradients are summed over both together.

The library's: minipar.Mesh, plus expert parallelism inside dp x cp, and any size without a table of ranks.
Source of the order: Megatron-LM on clusters, arXiv:2104.04473, section 3.2.
"""

import torch

AXES = ("pp", "dp", "cp", "tp")


def groups(*axes, pp=1, dp=1, cp=1, tp=1):
    """All groups of ranks that differ along these axes alone: groups("tp", dp=2, tp=2) -> [[0, 1], [2, 3]]."""
    sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp)
    grid = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    inside = [i for i, axis in enumerate(AXES) if axis in axes]
    outside = [i for i, axis in enumerate(AXES) if axis not in axes]
    num_members = torch.Size(sizes[axis] for axis in AXES if axis in axes).numel()
    return grid.permute(*outside, *inside).reshape(-1, num_members).tolist()


class Mesh:
    """mesh.comm("tp"): my tp ranks as a Comm; mesh.comm("dp", "cp"): those my gradients are summed with."""

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
