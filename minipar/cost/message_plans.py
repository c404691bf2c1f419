"""The messages of an all-reduce by algorithm, as (from, to, bytes): what `minipar.comm` does, without a rank or torch.

n bytes over p members of a group, k nodes of g members. Their sums over all members:

    ring, double_tree                       2 (p-1) n
    tree                                    2 (p-1) n
    halving_doubling, p a power of two      2 (p-1) n
    hierarchical                            2 (kg-1) n, of which 2 (k-1) n between nodes

The bytes in all are those of any algorithm; they differ in which pairs carry them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from minipar.chunks import chunk_sizes
from minipar.errors import divisors, one_of, require_divides, require_positive

Sends = Counter  # (source, destination) -> bytes, both as places in the group


def all_reduce_sends(algorithm: str, p: int, num_bytes: int, node_size: int | None = None) -> Sends:
    """Return the bytes of an all-reduce of `num_bytes` between each pair of the p members.

    node_size   for "hierarchical", consecutive members on a node; None: the largest divisor of p up to sqrt(p)

    Raises ValueError for an unknown algorithm, and where node_size does not divide p.
    """
    if algorithm not in PLANS:
        raise ValueError(f"algorithm={algorithm!r} has no plan; use {one_of(PLANS, near=algorithm)}")
    require_positive(p=p)
    if num_bytes < 0:
        raise ValueError(f"num_bytes={num_bytes}; use 0 or more")
    if algorithm == "hierarchical":
        g = node_size or max(d for d in divisors(p) if d * d <= p)
        require_divides("node_size", g, "the number of members", p)
        sends = _hierarchical(p, num_bytes, g)
    else:
        sends = PLANS[algorithm](p, num_bytes)
    total: Sends = Counter()
    for source, destination, sent in sends:
        if sent and source != destination:
            total[source, destination] += sent
    return total


def _ring(p: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Everybody sends all of it twice to the right, less chunk r and chunk r+1."""
    chunks = chunk_sizes(n, p)
    for r in range(p):
        yield r, (r + 1) % p, 2 * n - chunks[r] - chunks[(r + 1) % p]


def _halving_doubling(p: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Core ranks swap blocks with the ranks at distance q/2, ..., 1, down and up again; the others fold in and out."""
    core = 1 << (p.bit_length() - 1)
    chunks = chunk_sizes(n, core)
    for r in range(core):
        for bit in range(core.bit_length() - 1):
            distance = 1 << bit
            for holder in (r ^ distance, r):  # the partner's block in the halving, its own in the doubling
                start = holder // distance * distance
                yield r, r ^ distance, sum(chunks[start : start + distance])
    for r in range(core, p):
        yield r, r - core, n
        yield r - core, r, n


def _tree(p: int, n: int) -> Iterator[tuple[int, int, int]]:
    for r in range(1, p):
        parent = r & (r - 1)
        yield r, parent, n
        yield parent, r, n


def _double_tree(p: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Half of it along each of two trees, the second the mirror image of the first, or, for odd p, shifted by one."""
    first, second = chunk_sizes(n, 2)
    for child, parent in _tree_edges(0, p):
        yield from ((child, parent, first), (parent, child, first))
        a, b = (p - 1 - child, p - 1 - parent) if p % 2 == 0 else ((child - 1) % p, (parent - 1) % p)
        yield from ((a, b, second), (b, a, second))


def _tree_edges(low: int, high: int, parent: int | None = None) -> Iterator[tuple[int, int]]:
    """List (child, parent) of the tree over the places from low to high-1, whose inner nodes are the odd ones."""
    if low >= high:
        return
    root = low if high - low == 1 else low + ((high - low) // 2 - 1 | 1)
    if parent is not None:
        yield root, parent
    yield from _tree_edges(low, root, root)
    yield from _tree_edges(root + 1, high, root)


def _hierarchical(p: int, n: int, g: int) -> Iterator[tuple[int, int, int]]:
    """A ring inside each node, and across nodes a ring for each chunk."""
    chunks = chunk_sizes(n, g)
    for node in range(p // g):
        for source, destination, sent in _ring(g, n):
            yield node * g + source, node * g + destination, sent
    for place, chunk in enumerate(chunks):
        for source, destination, sent in _ring(p // g, chunk):
            yield source * g + place, destination * g + place, sent


PLANS = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "double_tree": _double_tree,
    "hierarchical": _hierarchical,
}
