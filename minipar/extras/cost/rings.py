"""The widest ring of a topology, and the largest number of rings that run at once.

A ring visits every rank once. Each link divides its speed among the ring's hops that use it; the smallest such share is the
ring's width. NCCL searches for wide rings at start-up; a ring in rank order may be far from the widest.

Both searches (`widest_ring`, `rings_at_once`) are exact, by branch and bound, and take exponential time, so they are meant
for one or two nodes. `wide_ring` is for any number of ranks, and exact for few. A Comm's rings follow the order of its
ranks:

    comm = world.subgroup(wide_ring(topology).ranks, "wide ring")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from minipar.extras.cost.topology import Link, Route, Topology, Vertex

MAX_HOPS = 1_000_000  # a search gives up after trying this many hops, which takes about a second


class Ring(NamedTuple):
    """The ranks in ring order, starting with 0, and the bytes per second around the ring."""

    ranks: tuple[int, ...]
    width: float


def ring_width(topology: Topology, ranks: tuple[int, ...]) -> float:
    """Return the bytes per second of a ring: the minimum over its links of speed / number of hops that use the link."""
    routes = topology.routes()
    uses = Counter(link for hop in zip(ranks, (*ranks[1:], ranks[0])) for link in routes.get(hop, ()))
    speeds = dict(topology.speeds)
    return min((speeds[link] / times for link, times in uses.items()), default=float("inf"))


def widest_ring(topology: Topology) -> Ring:
    """Return the widest ring; among equally wide rings, the first in rank order.

    Raises ValueError if the search would take too long.
    """
    speeds, best = dict(topology.speeds), Ring(tuple(range(topology.num_ranks)), 0.0)
    limit = _widest_possible(topology)

    def wide_enough(uses: Counter[Link], route: Route) -> bool:
        return all(speeds[link] / (uses[link] + 1) > best.width for link in route)

    for ranks in _rings(topology, wide_enough):
        if (width := ring_width(topology, ranks)) > best.width:
            best = Ring(ranks, width)
        if best.width >= limit:
            break
    return best


def wide_ring(topology: Topology, exact_up_to: int = 8) -> Ring:
    """Return a wide ring: the widest for at most `exact_up_to` ranks, else one that no 2-opt move widens.

    The 2-opt search starts with a greedy ring, in which each rank is followed by the one that it reaches fastest. Then it
    reverses stretches of the ring as long as that widens the ring, or reduces the number of its narrowest links.
    Evaluates about p^3 hops for each improvement.
    """
    p = topology.num_ranks
    if p <= exact_up_to:
        return widest_ring(topology)
    routes, speeds = topology.routes(), dict(topology.speeds)
    ranks, uses, rest = [0], Counter[Link](), set(range(1, p))
    while rest:

        def share(rank: int) -> tuple[float, int]:
            links = routes[ranks[-1], rank]
            return min(speeds[link] / (uses[link] + 1) for link in links), -rank

        ranks.append(max(rest, key=share))
        rest.remove(ranks[-1])
        uses.update(routes[ranks[-2], ranks[-1]])
    best = _quality(topology, tuple(ranks))
    improved = True
    while improved:
        improved = False
        for i in range(1, p - 1):
            for j in range(i + 1, p):
                turned = (*ranks[:i], *reversed(ranks[i : j + 1]), *ranks[j + 1 :])
                if (quality := _quality(topology, turned)) > best:
                    ranks, best, improved = list(turned), quality, True
    return Ring(tuple(ranks), best[0])


def _quality(topology: Topology, ranks: tuple[int, ...]) -> tuple[float, int]:
    """Return the ring's width, and minus the number of its narrowest links; larger is better."""
    speeds = dict(topology.speeds)
    shares = [speeds[link] / times for link, times in _uses(topology, ranks).items()]
    width = min(shares)
    return width, -sum(share <= width for share in shares)


def rings_at_once(topology: Topology, width: float) -> list[tuple[int, ...]]:
    """Return as many rings, of `width` bytes per second each, as can run at once.

    A link of speed s serves floor(s / width) hops. If every link's speed is `width`, the rings share no link.
    Raises ValueError if the search would take too long.
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

        def fits(uses: Counter[Link], route: Route) -> bool:
            return all(used[link] + uses[link] < room[link] for link in route)

        for ranks in _rings(topology, fits, tried):
            if len(best) >= limit:
                return
            if ranks >= after:  # rings are added in ascending order, so that each set is tried once
                extend([*rings, ranks], used + _uses(topology, ranks))

    if topology.num_ranks > 1:
        extend([], Counter())
    return best


def _uses(topology: Topology, ranks: tuple[int, ...]) -> Counter[Link]:
    routes = topology.routes()
    return Counter(link for hop in zip(ranks, (*ranks[1:], ranks[0])) for link in routes[hop])


def _rings(
    topology: Topology, fits: Callable[[Counter[Link], Route], bool], tried: Iterator[int] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield, in rank order, the rings in which every hop passes `fits(links used by earlier hops, the hop's route)`."""
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
    """Return an upper bound on a ring's width: the largest width at which routes still connect all ranks."""
    speeds = dict(topology.speeds)
    width = {hop: min(speeds[link] for link in route) for hop, route in topology.routes().items()}
    joined, limit = {0}, float("inf")
    while len(joined) < topology.num_ranks:  # Prim's algorithm for the widest spanning tree
        best, rank = max((w, b) for (a, b), w in width.items() if a in joined and b not in joined)
        joined.add(rank)
        limit = min(limit, best)
    return limit


def _most_possible(topology: Topology, room: Counter[Link]) -> int:
    """Return an upper bound on the number of rings: each contains a path from rank 0 to every rank and back."""
    flows = [
        _max_flow(room, *ends) for rank in range(1, topology.num_ranks) for ends in ((0, rank), (rank, 0))
    ]
    return min(flows, default=0)


def _max_flow(room: Counter[Link], source: Vertex, target: Vertex) -> int:
    """Return the maximum flow, by Ford and Fulkerson's algorithm with paths of one unit."""
    left, flow = Counter(room), 0
    while True:
        came_from: dict[Vertex, Vertex | None] = {source: None}
        frontier = [source]
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
