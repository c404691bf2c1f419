"""Collectives in two levels, inside nodes and across nodes, so that a rank sends only 1/g of the vector to other nodes.

With k nodes of g ranks each, p = kg, and n bytes in the whole vector, each rank sends, if p divides the length:

                     inside its node    to other nodes
    reduce_scatter   (g-1)/g n          (k-1)/k n/g
    all_gather       (g-1)/g n          (k-1)/k n/g
    all_reduce       the sum of both

Each row sums to (p-1)/p n, as in a flat ring, and an all-reduce to twice that; but a rank sends only (k-1)/k n/g over the
slow link between nodes. In a flat ring, the rank at the edge of each node sends all its (p-1)/p n over that link; in
halving and doubling, every rank sends (k-1)/k n over it. The steps are those of rings of g and k ranks. If p does not
divide the length, each ring sends what `ring.py` states. An all-reduce consists of a reduce_scatter and an all_gather, and
`Traffic` counts its bytes under these two names.

Let chunk c belong to local rank i of node m: c = mg + i. Each node sums its terms of chunk c in the order of local ranks
i+1, i+2, ..., i; the nodes' sums are added in the order of nodes m+1, m+2, ..., m. All-reduce and reduce-scatter add in the
same order, so their results are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from minipar.comm import ring
from minipar.comm.point_to_point import Levels, PointToPoint, Sizes
from minipar.comm.reduction import find_reduction
from minipar.support.chunks import check_sizes, chunk_sizes
from minipar.support.errors import divisors, require_divides

T = TypeVar("T")


def all_reduce(
    comm: PointToPoint,
    x: Tensor,
    op: str = "sum",
    out: Tensor | None = None,
    node_size: int | None = None,
) -> Tensor:
    """Return the sum over ranks of x on every rank, bitwise equal: a reduce-scatter, then an all-gather.

    node_size   number of consecutive ranks per node; None: the launcher's number if known, else the largest divisor of p up
                to sqrt(p)

    `out`, if given, receives the result; it may be x itself. Raises ValueError if node_size does not divide the number of
    ranks.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes = chunk_sizes(x.numel(), comm.size)
    own = reduce_scatter(comm, x.detach().reshape(-1), op, sizes, node_size=node_size)
    all_gather(comm, own, sizes, out.view(-1), node_size)
    return out


def reduce_scatter(
    comm: PointToPoint,
    x: Tensor,
    op: str = "sum",
    sizes: Sizes = None,
    out: Tensor | None = None,
    node_size: int | None = None,
) -> Tensor:
    """Return this rank's chunk of the sum over ranks of x: x [N, ...] -> [sizes[r], ...], cut along dim 0.

    Inside a node, local rank i gets the node's sums of the chunks for local rank i of each node. Across nodes,
    these sums are reduce-scattered, and each rank gets its own chunk. `out`, if given, receives the result; it may be this
    rank's chunk of x. node_size is as in `all_reduce`.
    """
    node, across = levels(comm, node_size)
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    if out is None:
        out = x.new_empty((sizes[comm.rank], *x.shape[1:]))
    divide = find_reduction(op, x.dtype).divide
    inner = "sum" if divide else op
    lengths = [size * x.shape[1:].numel() for size in sizes]
    chunks = torch.split(x.detach().reshape(-1), lengths)
    by_place = torch.cat(_by_column(chunks, node.size))
    of_places = _of_places(lengths, node.size)
    scatter = partial(ring.reduce_scatter, node, by_place, inner, of_places)
    of_nodes = lengths[node.rank :: node.size]
    with node.saying(comm.running), across.saying(comm.running):
        own = node.custom("reduce_scatter", scatter)
        scatter = partial(ring.reduce_scatter, across, own, inner, of_nodes, out.view(-1))
        across.custom("reduce_scatter", scatter)
    if divide:
        out.div_(comm.size)
    return out


def all_gather(
    comm: PointToPoint,
    x: Tensor,
    sizes: Sizes = None,
    out: Tensor | None = None,
    node_size: int | None = None,
) -> Tensor:
    """Concatenate every rank's x along dim 0: x [sizes[r], ...] -> [sum(sizes), ...]; without `sizes`, all are equal.

    Across nodes, local rank i gathers the chunks of local rank i of all nodes; inside a node, all ranks then gather the
    chunks of all local ranks. `out`, if given, receives the result; x may be this rank's chunk of it. node_size is as in
    `all_reduce`.
    """
    node, across = levels(comm, node_size)
    sizes = ring.gathered_sizes(comm, x, sizes)
    if out is None:
        out = x.new_empty((sum(sizes), *x.shape[1:]))
    lengths = [size * x.shape[1:].numel() for size in sizes]
    of_places = _of_places(lengths, node.size)
    by_place = x.new_empty(sum(lengths))
    own = torch.split(by_place, of_places)[node.rank]
    of_nodes = lengths[node.rank :: node.size]
    gather = partial(ring.all_gather, across, x.detach().reshape(-1), of_nodes, own)
    with node.saying(comm.running), across.saying(comm.running):
        across.custom("all_gather", gather)
        node.custom("all_gather", partial(ring.all_gather, node, own, of_places, by_place))
    chunks = torch.split(by_place, _by_column(lengths, node.size))
    torch.cat(_by_column(chunks, across.size), out=out.view(-1))
    return out


def levels(comm: PointToPoint, node_size: int | None = None) -> Levels:
    """Return the Comms of both levels; all ranks must call this at the same point. Raises ValueError like `all_reduce`."""
    if node_size is None and comm.levels is not None:
        return comm.levels
    g = node_size or _near_square_root(comm.size)
    require_divides("node_size", g, "the number of ranks", comm.size)
    node, place = divmod(comm.rank, g)
    inside = comm.subgroup(range(node * g, (node + 1) * g), f"node of {g}")
    return Levels(inside, comm.subgroup(range(place, comm.size, g), f"across nodes of {g}"))


def ranks_per_node(ranks: Sequence[int], node_size: int | None) -> int | None:
    """Return how many of these world ranks each node has, if a node has `node_size` consecutive world ranks.

    None if that is unknown or unequal, the ranks are not in the order of nodes, each node has one rank, or one has all.
    """
    if node_size is None:
        return None
    nodes = [rank // node_size for rank in ranks]
    g = nodes.count(nodes[0])
    blocks = [node for node in dict.fromkeys(nodes) for _ in range(g)]
    return g if nodes == blocks and 1 < g < len(ranks) else None


def _near_square_root(p: int) -> int:
    return max(d for d in divisors(p) if d * d <= p)


# Chunks in rank order form a table with a row for each node and a column for each local rank.


def _by_column(table: Sequence[T], columns: int) -> list[T]:
    """Return the entries of a table in column order; `table` lists them in row order."""
    return [entry for column in range(columns) for entry in table[column::columns]]


def _of_places(lengths: list[int], columns: int) -> list[int]:
    """Return, for each local rank, the total length of its chunks over all nodes."""
    return [sum(lengths[place::columns]) for place in range(columns)]
