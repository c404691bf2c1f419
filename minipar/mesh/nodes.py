"""Axes of a mesh that cross from machine to machine. Nodes are blocks of neighbouring ranks, as torchrun numbers them."""

from __future__ import annotations

from math import prod

from minipar.errors import require_positive
from minipar.mesh.mesh import DENSE, Mesh


def crossing(mesh_sizes: dict[str, int], ranks_per_node: int) -> dict[str, bool]:
    """For each axis: does any of its groups have ranks on more than one node?

    mesh_sizes      arguments of a Mesh: dict(dp=2, tp=4)
    ranks_per_node  neighbouring ranks on a node; the last node may have fewer
    Raises ValueError where there is no such mesh, or ranks_per_node is below 1.
    """
    mesh = mesh_of_sizes(mesh_sizes)
    require_positive(ranks_per_node=ranks_per_node)
    several_nodes = ranks_per_node < mesh.world_size
    return {
        # A group spans a block of stride * size neighbours, and blocks fill the world from rank 0.
        axis: size > 1 and several_nodes and ranks_per_node % (mesh.stride(axis) * size) != 0
        for axis, size in mesh.sizes.items()
    }


def mesh_of_sizes(sizes: dict[str, int]) -> Mesh:
    """A Mesh for arithmetic alone, of as many ranks as the sizes multiply to."""
    return Mesh(prod(sizes.get(axis, 1) for axis in DENSE), **sizes)
