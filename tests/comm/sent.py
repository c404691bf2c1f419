"""What every algorithm sends, in elements a message: the formulas of the docstrings, evaluated."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod

from minipar.extras.collectives.double_tree import two_trees
from minipar.support.chunks import chunk_sizes
from tests.comm.cases import Case


def messages(case: Case, rank: int, size: int) -> list[int]:
    """The lengths in bytes of the messages `rank` sends; empty ones are not messages."""
    if case.algorithm == "auto" or size == 1 and case.algorithm != "native":
        assert size == 1
        return []
    elems = FORMULAS[case.collective, case.algorithm](case, rank, size)
    return [n * case.dtype.itemsize for n in elems if n]


def _elems(case: Case) -> int:
    return prod(case.shape)


def _row(case: Case) -> int:
    return prod(case.shape[1:])


def _sizes(case: Case, size: int) -> list[int]:
    """The elements of every rank's chunk, along dim 0."""
    if case.collective == "all_gather":
        sizes = case.sizes or [case.shape[0]] * size
    else:
        sizes = case.sizes or chunk_sizes(case.shape[0], size)
    return [n * _row(case) for n in sizes]


def _in_segments(case: Case, lengths) -> list[int]:
    """What is to be added travels in messages of at most a segment."""
    longest = max(1, case.segment_bytes // case.dtype.itemsize)
    return [min(longest, n - start) for n in lengths for start in range(0, n, longest)]


def _all_but(size: int, *left_out: int) -> list[int]:
    return [c for c in range(size) if c not in [r % size for r in left_out]]


# Ring -----------------------------------------------------------------------------------------------------------


def ring_reduce_scatter(case, rank, size, chunks=None):
    """All of x but this rank's own chunk."""
    chunks = chunks or _sizes(case, size)
    return _in_segments(case, [chunks[c] for c in _all_but(size, rank)])


def ring_all_gather(case, rank, size, chunks=None):
    """Every chunk but the right neighbour's."""
    chunks = chunks or _sizes(case, size)
    return [chunks[c] for c in _all_but(size, rank + 1)]


def ring_all_reduce(case, rank, size, elems=None):
    """All of x twice, less chunk r and chunk r+1."""
    chunks = chunk_sizes(_elems(case) if elems is None else elems, size)
    return ring_reduce_scatter(case, rank, size, chunks) + ring_all_gather(case, rank, size, chunks)


def ring_broadcast(case, rank, size):
    """The root scatters all but its own chunk; then the all-gather."""
    chunks = chunk_sizes(_elems(case), size)
    scattered = [chunks[c] for c in _all_but(size, case.root)] if rank == case.root else []
    return scattered + ring_all_gather(case, rank, size, chunks)


def ring_reduce(case, rank, size):
    """The reduce-scatter; then everybody but the root hands in its chunk."""
    chunks = chunk_sizes(_elems(case), size)
    return ring_reduce_scatter(case, rank, size, chunks) + ([chunks[rank]] if rank != case.root else [])


# Halving and doubling -------------------------------------------------------------------------------------------


def _core(size: int) -> int:
    return 2 ** int(log2(size))


def _halving(chunks: list[int], rank: int) -> list[int]:
    """The half, quarter, ... that the partner's side keeps: together all but this rank's own chunk."""
    core = len(chunks)
    distances = [core >> i for i in range(1, core.bit_length())]
    return [sum(chunks[(start := (rank ^ d) // d * d) : start + d]) for d in distances]


def _doubling(chunks: list[int], rank: int) -> list[int]:
    """This rank's chunk, then the two around it, the four, up to half of all."""
    distances = [1 << i for i in range(len(chunks).bit_length() - 1)]
    return [sum(chunks[(start := rank // d * d) : start + d]) for d in distances]


def _folded(case, rank, size, inside) -> list[int]:
    """Ranks past the core send x and nothing else; the ranks they fold into also send the result."""
    core, n = _core(size), _elems(case)
    return [n] if rank >= core else inside + ([n] if rank + core < size else [])


def halving_doubling_all_reduce(case, rank, size):
    """Halving and doubling of the chunks of the core ranks."""
    core = _core(size)
    chunks = chunk_sizes(_elems(case), core)
    inside = _in_segments(case, _halving(chunks, rank)) + _doubling(chunks, rank) if rank < core else []
    return _folded(case, rank, size, inside)


def doubling_all_reduce(case, rank, size):
    """x in every step."""
    return _folded(case, rank, size, _in_segments(case, [_elems(case)] * int(log2(size))))


def halving_reduce_scatter(case, rank, size):
    """Core rank r stands for chunk r and chunk r+q, and hands on the latter."""
    core, chunks = _core(size), _sizes(case, size)
    if rank >= core:
        return [_elems(case)]
    carried = [sum(chunks[r::core]) for r in range(core)]
    return _in_segments(case, _halving(carried, rank)) + chunks[rank + core : rank + core + 1]


def doubling_all_gather(case, rank, size):
    """Core rank r carries chunk r and chunk r+q, and sends the whole to rank r+q."""
    core, chunks = _core(size), _sizes(case, size)
    if rank >= core:
        return [chunks[rank]]
    carried = [sum(chunks[r::core]) for r in range(core)]
    return _doubling(carried, rank) + ([sum(chunks)] if rank + core < size else [])


# Trees, all-to-all, two levels, torch's own ---------------------------------------------------------------------


def _children(place: int, size: int) -> int:
    """How many places a place tells: those that differ from it in one bit below its lowest set one."""
    lowest = place & -place or 1 << ceil(log2(size))
    return sum(place + (1 << i) < size for i in range(lowest.bit_length() - 1))


def tree_broadcast(case, rank, size):
    """x to every child."""
    return [_elems(case)] * _children((rank - case.root) % size, size)


def tree_reduce(case, rank, size):
    """x once, but for the root."""
    return [_elems(case)] if rank != case.root else []


def tree_all_reduce(case, rank, size):
    """Up to rank 0, and down again."""
    at_0 = replace(case, root=0)
    return tree_reduce(at_0, rank, size) + tree_broadcast(at_0, rank, size)


def double_tree_all_reduce(case, rank, size):
    """A half once up, unless at the root, and once down to each child; the other half in the other tree."""
    halves = chunk_sizes(_elems(case), 2)
    ways = [len(tree.children) + (tree.parent is not None) for tree in two_trees(rank, size)]
    return _in_segments(case, [half for half, times in zip(halves, ways) for _ in range(times)])


def pairwise_all_to_all(case, rank, size):
    """Every chunk but the one that stays."""
    sizes = case.send_sizes(size, rank)
    return [sizes[c] * _row(case) for c in _all_but(size, rank)]


def _levels(chunks: list[int], rank: int, size: int):
    """(place, ranks per node, elements of each place) and (node, nodes, elements of each node's chunk of this place)."""
    g = max(d for d in range(1, size + 1) if size % d == 0 and d * d <= size)
    node, place = divmod(rank, g)
    return (place, g, [sum(chunks[i::g]) for i in range(g)]), (node, size // g, chunks[place::g])


def hierarchical_reduce_scatter(case, rank, size, chunks=None):
    """Around the ring of the node the chunks of all places, then around that of the nodes those of this place."""
    inside, across = _levels(chunks or _sizes(case, size), rank, size)
    return ring_reduce_scatter(case, *inside) + ring_reduce_scatter(case, *across)


def hierarchical_all_gather(case, rank, size, chunks=None):
    """Around the ring of the nodes the chunks of this place, then around that of the node those of all places."""
    inside, across = _levels(chunks or _sizes(case, size), rank, size)
    return ring_all_gather(case, *across) + ring_all_gather(case, *inside)


def hierarchical_all_reduce(case, rank, size):
    """A reduce-scatter, and an all-gather."""
    chunks = chunk_sizes(_elems(case), size)
    both = hierarchical_reduce_scatter, hierarchical_all_gather
    return [n for half in both for n in half(case, rank, size, chunks)]


def native(case, rank, size):
    """Its payload, booked as one message."""
    own = _sizes(case, size)[rank] if case.collective == "all_gather" else _elems(case)
    return [own if case.collective != "all_to_all" else sum(case.send_sizes(size, rank)) * _row(case)]


FORMULAS = {
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_reduce", "halving_doubling"): halving_doubling_all_reduce,
    ("all_reduce", "doubling"): doubling_all_reduce,
    ("all_reduce", "tree"): tree_all_reduce,
    ("all_reduce", "double_tree"): double_tree_all_reduce,
    ("all_reduce", "hierarchical"): hierarchical_all_reduce,
    ("reduce", "tree"): tree_reduce,
    ("reduce", "ring"): ring_reduce,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("reduce_scatter", "halving_doubling"): halving_reduce_scatter,
    ("reduce_scatter", "hierarchical"): hierarchical_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("all_gather", "halving_doubling"): doubling_all_gather,
    ("all_gather", "hierarchical"): hierarchical_all_gather,
    ("broadcast", "tree"): tree_broadcast,
    ("broadcast", "ring"): ring_broadcast,
    ("all_to_all", "pairwise"): pairwise_all_to_all,
    **{(name, "native"): native for name in ("all_reduce", "reduce", "reduce_scatter", "all_gather")},
    **{(name, "native"): native for name in ("broadcast", "all_to_all")},
}
