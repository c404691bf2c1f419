"""Mesh axes whose groups span several nodes. Nodes are blocks of consecutive ranks, as torchrun numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from minipar.mesh.mesh import DENSE, Mesh
from minipar.support.errors import require_positive


def axes_across_nodes(mesh_sizes: dict[str, int], ranks_per_node: int) -> dict[str, bool]:
    """Return, for each axis, whether any of its groups has ranks on more than one node.

    mesh_sizes      arguments of a Mesh: dict(dp=2, tp=4)
    ranks_per_node  consecutive ranks on a node; the last node may have fewer

    Raises ValueError if the sizes are invalid, or ranks_per_node is below 1.
    """
    mesh = mesh_without_comm(mesh_sizes)
    require_positive(ranks_per_node=ranks_per_node)
    several_nodes = ranks_per_node < mesh.world_size
    return {
        # A group spans a block of stride * size consecutive ranks, and blocks fill the world from rank 0.
        axis: size > 1 and several_nodes and ranks_per_node % (mesh.stride(axis) * size) != 0
        for axis, size in mesh.sizes.items()
    }


def members_per_node(group: Sequence[int], ranks_per_node: int) -> int | None:
    """Return how many consecutive members each node has.

    None if nodes have different numbers of members, if each node has one, or if one node has all.
    """
    nodes = [rank // ranks_per_node for rank in group]
    g = nodes.count(nodes[0])
    whole = len(nodes) % g == 0 and all(len(set(nodes[i : i + g])) == 1 for i in range(0, len(nodes), g))
    return g if whole and len(set(nodes)) == len(nodes) // g and 1 < g < len(nodes) else None


def mesh_without_comm(sizes: dict[str, int]) -> Mesh:
    """Make a Mesh without a Comm, for arithmetic; its number of ranks is the product of the sizes."""
    world_size = prod(sizes.get(axis, 1) for axis in DENSE)
    return Mesh(world_size, **sizes)
