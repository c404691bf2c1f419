"""Two levels: what can stay inside a node does, and only 1/g of the vector crosses between nodes.

With k nodes of g ranks, n bytes: inside the node a reduce-scatter, (g-1)/g n; across nodes an all-reduce of the own
chunk, 2 (k-1)/k n/g; inside again an all-gather, (g-1)/g n. Every rank sends 2(kg-1)/(kg) n in all, as in a flat ring,
but of that only 2 (k-1)/k n/g over the slow link, where each node's neighbour in a flat ring sends 2(kg-1)/(kg) n.
Where the sizes do not divide, each of the three sends what `ring.py` says; they are booked as the three they are.
"""

from __future__ import annotations

import torch

from minipar.chunks import chunk_sizes
from minipar.comm.reduction import find_reduction
from minipar.errors import divisors, require_divides


def all_reduce(
    comm, x: torch.Tensor, op: str = "sum", out=None, node_size: int | None = None
) -> torch.Tensor:
    """All-reduce over nodes of `node_size` neighbouring ranks (by default as the launcher knows them, else near sqrt(p)).

    Raises ValueError where node_size does not divide the number of ranks.
    """
    node, across = _levels(comm, node_size)
    reduction = find_reduction(op, x.dtype)
    inner = "sum" if reduction.divide else op
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    flat, target = x.detach().contiguous().view(-1), out.view(-1)
    sizes = chunk_sizes(flat.numel(), node.size)
    own = node.reduce_scatter(flat, inner, sizes, algorithm="ring")
    across.all_reduce_(own, inner, algorithm="ring")
    if reduction.divide:
        own.div_(comm.size)
    node.all_gather(own, sizes, algorithm="ring", out=target)
    return out


def _levels(comm, node_size: int | None):
    """The Comm inside my node, and the one of the ranks at my place in every node."""
    g = node_size or comm.node_size or _near_square_root(comm.size)
    require_divides("node_size", g, "the number of ranks", comm.size)
    node, place = divmod(comm.rank, g)
    inside = comm.subgroup(range(node * g, (node + 1) * g), f"node of {g}")
    return inside, comm.subgroup(range(place, comm.size, g), f"across nodes of {g}")


def _near_square_root(p: int) -> int:
    return max(d for d in divisors(p) if d * d <= p)
