"""All-reduce along two binary trees at once, each for half of the vector; a rank is an inner node in at most one of them.

In one binary tree a leaf only sends up and receives down, so half of the ranks use half of their links. Here the leaves of
one tree are inner nodes of the other. Each half is cut into segments, which move up the tree and down again in a pipeline.

Costs, n bytes, trees of height h = floor(log2 p), k segments of m bytes in each half, 2km = n:

    bytes   a rank sends n/2 up and n/2 down to each child, at most 2n; all ranks together send 2(p-1) n, as in a ring
    steps   the first segment is on all ranks after 2h messages, the last after about k more steps, each of at most 2
            receives from children, 1 send up, 1 receive from above and 2 sends down: 2 h alpha + 2 n beta + O(h m beta)

The latency is that of a tree, and the bytes are about those of a ring. Source: Sanders, Speck, Träff 2009, sections 2 and
4; NCCL's "Tree".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minipar.comm import reduction as reductions
from minipar.comm.point_to_point import PointToPoint
from minipar.comm.reduction import Reduction, find_reduction
from minipar.comm.ring import flatten
from minipar.comm.transport.stream import Pending
from minipar.support.chunks import bounds, chunk_sizes


class Node(NamedTuple):
    """A rank's neighbors in a tree: its parent (None at the root) and at most two children."""

    parent: int | None
    children: tuple[int, ...]


def two_trees(rank: int, p: int) -> tuple[Node, Node]:
    """Return this rank's node in each of the two trees.

    The positions of a tree are numbered from left to right, so that inner nodes have odd positions. In the first tree, rank
    r has position r; in the second, p-1-r if p is even, or (r+1) mod p if p is odd. So odd ranks are inner nodes only in
    the first tree, and even ranks only in the second. If p is odd, rank p-1 is a leaf in both.
    """
    first = _node(rank, p)
    if p % 2 == 0:
        return first, _renamed(_node(p - 1 - rank, p), lambda place: p - 1 - place)
    return first, _renamed(_node((rank + 1) % p, p), lambda place: (place - 1) % p)


def all_reduce(
    comm: PointToPoint, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of x over ranks, bitwise equal on every rank, because the roots send down the finished sums.

    Each rank sends the first half of x (as torch.chunk splits) once to its parent and once to each child in the first tree,
    and the second half likewise in the second tree, in messages of at most SEGMENT_BYTES. `out` may be x itself.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    reduction = find_reduction(op, x.dtype)
    flat, target = flatten(x), out.view(-1)
    edges = bounds(chunk_sizes(flat.numel(), 2))
    halves = [slice(*pair) for pair in zip(edges, edges[1:])]
    segments = [list(zip(_segments(flat[half]), _segments(target[half]), strict=True)) for half in halves]
    trees = two_trees(comm.rank, comm.size)
    rising: dict[tuple[int, int], Pending | None] = {}  # (tree, segment) -> handle of the send to the parent
    sent_down: list[Pending] = []
    # Every rank does its part of step s in both trees before its part of step s+1. In step s it sends segment s up. The sum
    # of segment s is back from the root 2h steps later at the earliest, so in step s+2h the rank sends it down. In the
    # steps between, it sends the following segments up.
    delay = 2 * (comm.size.bit_length() - 1)
    for step in range(len(segments[0]) + delay):
        for t, tree in enumerate(trees):
            if step < len(segments[t]):
                rising[t, step] = _up(comm, tree, *segments[t][step], reduction)
        for t, tree in enumerate(trees):
            if 0 <= step - delay < len(segments[t]):
                sent_down += _down(comm, tree, segments[t][step - delay][1], rising.pop((t, step - delay)))
    for handle in sent_down:
        handle.wait()
    return out


def _segments(flat: torch.Tensor) -> list[torch.Tensor]:
    length = max(1, reductions.SEGMENT_BYTES // flat.element_size())
    return list(torch.split(flat, length)) if flat.numel() else []


def _up(
    comm: PointToPoint, tree: Node, mine: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> Pending | None:
    """Add the children's sums to this rank's segment and send the sum to the parent; return the handle (root: None)."""
    received = [
        comm.exchange(
            None, None, mine.shape, mine.dtype, child, async_op=True,
            out=comm.scratch(mine.numel(), mine.dtype, f"of child {i}"),
        )
        for i, child in enumerate(tree.children)
    ]  # fmt: skip
    for pending in received:
        mine = reduction.combine(mine, pending.wait(), out=out)
    if tree.parent is not None:
        sent: Pending = comm.send(mine, tree.parent, async_op=True)
        return sent
    if mine.data_ptr() != out.data_ptr():  # a group of one: nothing was exchanged
        out.copy_(mine)
    if reduction.divide:
        out.div_(comm.size)
    return None


def _down(comm: PointToPoint, tree: Node, out: torch.Tensor, rising: Pending | None) -> list[Pending]:
    """Receive the total from the parent and send it to the children; return the handles."""
    if tree.parent is not None:
        assert rising is not None
        rising.wait()  # the tensor that this rank sent up may lie in `out`
        comm.exchange(None, None, out.shape, out.dtype, tree.parent, out=out)
    return [comm.send(out, child, async_op=True) for child in tree.children]


def _node(place: int, p: int) -> Node:
    """Return a position's parent and children in the tree whose positions from left to right are 0 to p-1."""
    low, high, parent = 0, p, None
    while (root := _root(low, high)) != place:
        parent = root
        low, high = (low, root) if place < root else (root + 1, high)
    sides = [side for side in ((low, root), (root + 1, high)) if side[0] < side[1]]
    return Node(parent, tuple(_root(*side) for side in sides))


def _root(low: int, high: int) -> int:
    """Return the root of the tree over positions low to high-1, where low is even.

    It is an odd position near the middle, or `low` if there is no other position.
    """
    return low if high - low == 1 else low + ((high - low) // 2 - 1 | 1)


def _renamed(node: Node, rank_at: Callable[[int], int]) -> Node:
    parent = None if node.parent is None else rank_at(node.parent)
    return Node(parent, tuple(rank_at(place) for place in node.children))


ALGORITHM = {"all_reduce": all_reduce}  # what `--algorithm double_tree` loads
