"""Hierarchical all-reduce: inside each node, then across nodes, so that each rank sends only 1/g of the vector outside.

With k nodes of g ranks and n bytes, each rank sends:

    reduce-scatter inside the node            (g-1)/g n
    all-reduce of its chunk across nodes      2 (k-1)/k n/g
    all-gather inside the node                (g-1)/g n

That is 2(kg-1)/(kg) n in all, as in a flat ring, but only 2 (k-1)/k n/g of it over the slow link between nodes. In a
flat ring, the rank at the edge of each node sends all its 2(kg-1)/(kg) n over that link. Where g or k does not divide
the length, each of the three sends what `ring.py` states. Traffic counts the three under their own kinds.
"""

from __future__ import annotations

import torch

from minipar.chunks import chunk_sizes
from minipar.comm.reduction import find_reduction
from minipar.errors import divisors, require_divides


def all_reduce(
    comm, x: torch.Tensor, op: str = "sum", out=None, node_size: int | None = None
) -> torch.Tensor:
    """All-reduce over nodes of `node_size` consecutive ranks.

    node_size   None: as known from the launcher, else, with p ranks, the largest divisor of p up to sqrt(p)

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


def make_levels(comm) -> None:
    """Make the Comms that `all_reduce` uses, all ranks at one time, before a thread runs it."""
    _levels(comm, None)


def _levels(comm, node_size: int | None):
    """Return the Comm of this rank's node, and the Comm of the ranks with this local rank in every node."""
    g = node_size or comm.node_size or _near_square_root(comm.size)
    require_divides("node_size", g, "the number of ranks", comm.size)
    node, place = divmod(comm.rank, g)
    inside = comm.subgroup(range(node * g, (node + 1) * g), f"node of {g}")
    return inside, comm.subgroup(range(place, comm.size, g), f"across nodes of {g}")


def _near_square_root(p: int) -> int:
    return max(d for d in divisors(p) if d * d <= p)
