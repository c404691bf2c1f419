"""Collectives in two levels: inside each node and across nodes, so that each rank sends only 1/g of the vector outside.

With k nodes of g ranks each, p = kg, and n bytes in the whole vector, each rank sends, where p divides the length:

                     inside its node    to other nodes
    reduce_scatter   (g-1)/g n          (k-1)/k n/g
    all_gather       (g-1)/g n          (k-1)/k n/g
    all_reduce       the sum of both

That is (p-1)/p n, as in a flat ring, twice for an all-reduce, but only (k-1)/k n/g of it goes over the slow link between
nodes. In a flat ring, the rank at the edge of each node sends all its (p-1)/p n over that link; in halving and doubling,
every rank sends (k-1)/k n over it. The steps are those of rings of g and of k ranks. Where p does not divide the length,
each ring sends what `ring.py` states. Traffic counts the collectives of each level under their own kinds.

Let chunk c belong to place i of node m: c = mg + i. In each node it is summed in the order of places i+1, i+2, ..., i, and
these sums in the order of nodes m+1, m+2, ..., m, by an all-reduce as by a reduce-scatter: the results are bitwise equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from minipar.chunks import check_sizes, chunk_sizes
from minipar.comm.reduction import find_reduction
from minipar.comm.ring import gathered_sizes
from minipar.errors import divisors, require_divides

if TYPE_CHECKING:
    from minipar.comm.communicator import Comm


class Levels(NamedTuple):
    """A rank's two groups: the ranks of its node, and the ranks with its place in every node."""

    node: Comm
    across: Comm


def all_reduce(
    comm, x: torch.Tensor, op: str = "sum", out=None, node_size: int | None = None
) -> torch.Tensor:
    """Return the sum over ranks of x on every rank, bitwise equal: a reduce-scatter, then an all-gather.

    node_size   ranks per node, which are consecutive; None: as known from the launcher, else, with p ranks, the largest
                divisor of p up to sqrt(p)

    `out`, if given, receives the result; it may be x itself. Raises ValueError where node_size does not divide the number
    of ranks.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    sizes = chunk_sizes(x.numel(), comm.size)
    own = reduce_scatter(comm, x.detach().reshape(-1), op, sizes, node_size=node_size)
    all_gather(comm, own, sizes, out.view(-1), node_size)
    return out


def reduce_scatter(
    comm, x: torch.Tensor, op: str = "sum", sizes=None, out=None, node_size: int | None = None
) -> torch.Tensor:
    """Return this rank's chunk of the sum over ranks of x: x [N, ...] -> [sizes[r], ...], cut along dim 0.

    Inside the node, place i gets the sums of the chunks of place i in all nodes; across nodes, each node gets its own of
    them. `out`, if given, receives the result; it may be this rank's chunk of x. node_size is as of `all_reduce`.
    """
    node, across = levels(comm, node_size)
    sizes = check_sizes(sizes, x.shape[0], comm.size, "sizes")
    out = x.new_empty((sizes[comm.rank], *x.shape[1:])) if out is None else out
    reduction, lengths = find_reduction(op, x.dtype), [size * x.shape[1:].numel() for size in sizes]
    inner = "sum" if reduction.divide else op
    chunks = x.detach().reshape(-1).split(lengths)
    by_place = torch.cat(_by_column(chunks, node.size))
    own = node.reduce_scatter(by_place, inner, _of_places(lengths, node.size), algorithm="ring")
    across.reduce_scatter(own, inner, lengths[node.rank :: node.size], algorithm="ring", out=out.view(-1))
    if reduction.divide:
        out.div_(comm.size)
    return out


def all_gather(comm, x: torch.Tensor, sizes=None, out=None, node_size: int | None = None) -> torch.Tensor:
    """Concatenate every rank's x along dim 0: x [sizes[r], ...] -> [sum(sizes), ...]; without `sizes`, all are equal.

    Across nodes, place i gathers the chunks of place i in all nodes; inside the node, all gather those of all places.
    `out`, if given, receives the result; x may be this rank's chunk of it. node_size is as of `all_reduce`.
    """
    node, across = levels(comm, node_size)
    sizes = gathered_sizes(comm, x, sizes)
    out = x.new_empty((sum(sizes), *x.shape[1:])) if out is None else out
    lengths = [size * x.shape[1:].numel() for size in sizes]
    of_places = _of_places(lengths, node.size)
    by_place = x.new_empty(sum(lengths))
    own = by_place.split(of_places)[node.rank]
    across.all_gather(x.detach().reshape(-1), lengths[node.rank :: node.size], algorithm="ring", out=own)
    node.all_gather(own, of_places, algorithm="ring", out=by_place)
    chunks = by_place.split(_by_column(lengths, node.size))
    torch.cat(_by_column(chunks, across.size), out=out.view(-1))
    return out


def levels(comm, node_size: int | None = None) -> Levels:
    """Return the Comms of both levels, made by all ranks at one time. Raises ValueError as `all_reduce` does."""
    if node_size is None and comm.levels is not None:
        return comm.levels
    g = node_size or comm.node_size or _near_square_root(comm.size)
    require_divides("node_size", g, "the number of ranks", comm.size)
    node, place = divmod(comm.rank, g)
    inside = comm.subgroup(range(node * g, (node + 1) * g), f"node of {g}")
    return Levels(inside, comm.subgroup(range(place, comm.size, g), f"across nodes of {g}"))


def _near_square_root(p: int) -> int:
    return max(d for d in divisors(p) if d * d <= p)


# Chunks in the order of ranks are a table with a row for each node and a column for each place.


def _by_column(table, columns: int) -> list:
    """Return the entries of a table, given row by row, column by column."""
    return [entry for column in range(columns) for entry in table[column::columns]]


def _of_places(lengths: list[int], columns: int) -> list[int]:
    """Return the length, over all nodes, of the chunks of each place."""
    return [sum(lengths[place::columns]) for place in range(columns)]
