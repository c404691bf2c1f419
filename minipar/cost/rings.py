"""The widest rings of a topology: in which order to pass messages around, and how many rings run at once.

A ring visits every rank once. Its hops share links: the ring's width is the least speed of a link over the number of hops
that use it. NCCL searches for such rings at start-up; a flat ring in rank order may be far from the widest.

Both searches are exact, by branch and bound, and exponential: for a node, or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from minipar.cost.topology import Link, Topology

MAX_HOPS = 1_000_000  # tried before a search gives up: about a second


class Ring(NamedTuple):
    """The ranks in order, beginning with 0, and bytes per second around the ring."""

    ranks: tuple[int, ...]
    width: float


def ring_width(topology: Topology, ranks: tuple[int, ...]) -> float:
    """Return the bytes per second of this ring: the least speed of a link over the ring's hops that share it."""
    routes = topology.routes()
    uses = Counter(link for hop in zip(ranks, (*ranks[1:], ranks[0])) for link in routes.get(hop, ()))
    speeds = dict(topology.speeds)
    return min((speeds[link] / times for link, times in uses.items()), default=float("inf"))


def widest_ring(topology: Topology) -> Ring:
    """Return a ring of the greatest width; of equal ones the first by rank order.

    Raises ValueError where the search would take too long.
    """
    speeds, best = dict(topology.speeds), Ring(tuple(range(topology.num_ranks)), 0.0)
    limit = _widest_possible(topology)

    def wide_enough(uses: Counter[Link], route) -> bool:
        return all(speeds[link] / (uses[link] + 1) > best.width for link in route)

    for ranks in _rings(topology, wide_enough):
        if (width := ring_width(topology, ranks)) > best.width:
            best = Ring(ranks, width)
        if best.width >= limit:
            break
    return best


def rings_at_once(topology: Topology, width: float) -> list[tuple[int, ...]]:
    """Return as many rings of this width as links hold at once: a link of speed s serves floor(s / width) hops.

    With width the speed of all links, the rings share no link. Raises ValueError where the search would take too long.
    """
    if not width > 0:
        raise ValueError(f"width={width} bytes per second; use a number above 0")
    room = Counter({link: int(speed / width * (1 + 1e-12)) for link, speed in topology.speeds})
    limit, tried = _most_possible(topology, room), count(1)
    best: list[tuple[int, ...]] = []

    def extend(rings: list[tuple[int, ...]], used: Counter[Link]) -> None:
        nonlocal best
        best = max(best, rings, key=len)
        after = rings[-1] if rings else ()

        def fits(uses: Counter[Link], route) -> bool:
            return all(used[link] + uses[link] < room[link] for link in route)

        for ranks in _rings(topology, fits, tried):
            if len(best) >= limit:
                return
            if ranks >= after:  # in order: the same rings in another order are not tried again
                extend([*rings, ranks], used + _uses(topology, ranks))

    if topology.num_ranks > 1:
        extend([], Counter())
    return best


def _uses(topology: Topology, ranks: tuple[int, ...]) -> Counter[Link]:
    routes = topology.routes()
    return Counter(link for hop in zip(ranks, (*ranks[1:], ranks[0])) for link in routes[hop])


def _rings(topology: Topology, fits, tried=None) -> Iterator[tuple[int, ...]]:
    """List the rings, in rank order, each of whose hops fits beside the hops before it: fits(uses so far, route)."""
    routes, tried, p = topology.routes(), tried or count(1), topology.num_ranks

    def from_(path: tuple[int, ...], uses: Counter[Link]) -> Iterator[tuple[int, ...]]:
        rest = [rank for rank in range(p) if rank not in path] or [0]
        for rank in rest:
            if next(tried) > MAX_HOPS:
                raise ValueError(f"num_ranks={p}: {MAX_HOPS} hops tried, and more are left; use fewer ranks")
            route = routes.get((path[-1], rank), ())
            if not fits(uses, route):
                continue
            if rank == 0:
                yield path
            else:
                yield from from_((*path, rank), uses + Counter(route))

    return from_((0,), Counter())


def _widest_possible(topology: Topology) -> float:
    """Return a width that no ring exceeds: the greatest at which routes of that width still connect all ranks."""
    speeds = dict(topology.speeds)
    width = {hop: min(speeds[link] for link in route) for hop, route in topology.routes().items()}
    joined, limit = {0}, float("inf")
    while len(joined) < topology.num_ranks:  # the widest way on: a spanning tree, as by Prim
        best, rank = max((w, b) for (a, b), w in width.items() if a in joined and b not in joined)
        joined.add(rank)
        limit = min(limit, best)
    return limit


def _most_possible(topology: Topology, room: Counter[Link]) -> int:
    """Return a number of rings that no set exceeds: each has a path from rank 0 to any other rank, and back."""
    flows = [
        _max_flow(room, *ends) for rank in range(1, topology.num_ranks) for ends in ((0, rank), (rank, 0))
    ]
    return min(flows, default=0)


def _max_flow(room: Counter[Link], source: int, target: int) -> int:
    """Ford and Fulkerson, one unit a path."""
    left, flow = Counter(room), 0
    while True:
        came_from, frontier = {source: None}, [source]
        for here in frontier:
            for (a, b), free in left.items():
                if a == here and free > 0 and b not in came_from:
                    came_from[b] = a
                    frontier.append(b)
        if target not in came_from:
            return flow
        vertex = target
        while (before := came_from[vertex]) is not None:
            left[before, vertex] -= 1
            left[vertex, before] += 1
            vertex = before
        flow += 1
