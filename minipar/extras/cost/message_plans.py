"""The messages of an all-reduce, computed as (from, to, bytes) without running it. Imports no torch.

In an all-reduce of n bytes over p members of a group (k nodes of g members), all members together send

    ring, tree                              2 (p-1) n
    halving_doubling, p a power of two      2 (p-1) n
    hierarchical                            2 (kg-1) n, of which 2 (k-1) n between nodes

All algorithms send the same total; they differ in the pairs of members that send it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from minipar.support.chunks import chunk_sizes
from minipar.support.errors import divisors, one_of, require_divides, require_positive

# (source, destination) -> bytes; members are numbered by their index in the group
Sends = Counter[tuple[int, int]]
Messages = Iterator[tuple[int, int, int]]  # (source, destination, bytes)


def all_reduce_sends(algorithm: str, p: int, num_bytes: int, node_size: int | None = None) -> Sends:
    """Return the bytes that an all-reduce of `num_bytes` sends between each pair of the p members.

    node_size   for "hierarchical": number of consecutive members on a node; None: the largest divisor of p up to sqrt(p)

    Raises ValueError for an unknown algorithm, or if node_size does not divide p.
    """
    if algorithm not in PLANS:
        raise ValueError(f"algorithm={algorithm!r} has no plan; use {one_of(PLANS, near=algorithm)}")
    require_positive(p=p)
    if num_bytes < 0:
        raise ValueError(f"num_bytes={num_bytes}; use 0 or more")
    plan = PLANS[algorithm]
    if algorithm == "hierarchical":
        g = node_size or max(d for d in divisors(p) if d * d <= p)
        require_divides("node_size", g, "the number of members", p)
        plan = partial(plan, g=g)
    total: Sends = Counter()
    for source, destination, sent in plan(p, num_bytes):
        if sent and source != destination:
            total[source, destination] += sent
    return total


def _ring(p: int, n: int) -> Messages:
    """Yield the messages of a ring over p nearly equal chunks."""
    return _ring_of(chunk_sizes(n, p))


def _ring_of(chunks: list[int]) -> Messages:
    """Yield a ring's messages: rank r sends chunks r and r+1 once, and all other chunks twice, to its right neighbour."""
    p, n = len(chunks), sum(chunks)
    for r in range(p):
        yield r, (r + 1) % p, 2 * n - chunks[r] - chunks[(r + 1) % p]


def _halving_doubling(p: int, n: int) -> Messages:
    """Yield the messages of halving and doubling. With q the largest power of two up to p, the first q ranks are the core.

    Core ranks exchange blocks at distances q/2 ... 1 ... q/2. Each other rank sends its vector to a core rank first, and
    receives the sum from it last.
    """
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


def _tree(p: int, n: int) -> Messages:
    for r in range(1, p):
        parent = r & (r - 1)
        yield r, parent, n
        yield parent, r, n


def _hierarchical(p: int, n: int, g: int) -> Messages:
    """Yield the messages of a ring inside each node and, for each local rank, of a ring across nodes."""
    chunks = chunk_sizes(n, p)
    of_places = [chunks[place::g] for place in range(g)]
    for node in range(p // g):
        for source, destination, sent in _ring_of([sum(lengths) for lengths in of_places]):
            yield node * g + source, node * g + destination, sent
    for place, lengths in enumerate(of_places):
        for source, destination, sent in _ring_of(lengths):
            yield source * g + place, destination * g + place, sent


PLANS: dict[str, Callable[..., Messages]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
