"""A cluster's links as a graph, and the bytes that an all-reduce puts on the slowest link.

These bytes depend on the algorithm and on the placement of the mesh's axes. The graph's vertices are ranks (integers), and
switches, network cards and processors (strings), which only forward messages. A link has one direction and a speed. A
message takes the route with the fewest links and, among such routes, the widest; no route leads through a rank.

In an all-reduce of n bytes over p = k g ranks (k nodes, each of g consecutive ranks and c cards; c divides g), a card sends

    ring              2 (p-1)/p n if it is the one card of its node that the ring uses, else nothing
    hierarchical      2 (k-1)/k n/c, on every card
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from minipar.cost.machines import Machine
from minipar.extras.cost.message_plans import all_reduce_sends
from minipar.mesh.nodes import members_per_node
from minipar.support.errors import require_divides, require_positive

Vertex = int | str
Link = tuple[Vertex, Vertex]
Route = tuple[Link, ...]


@dataclass(frozen=True)
class Topology:
    """The links between ranks 0 to num_ranks-1.

    speeds          (link, bytes per second), where a link is (from, to); a cable is two links
    ranks_per_node  number of consecutive ranks on a node

    Raises ValueError for a speed that is not above 0, or a rank that does not exist.
    """

    num_ranks: int
    speeds: tuple[tuple[Link, float], ...]
    ranks_per_node: int

    def __post_init__(self) -> None:
        require_positive(num_ranks=self.num_ranks, ranks_per_node=self.ranks_per_node)
        for link, speed in self.speeds:
            if not speed > 0:
                raise ValueError(f"the link {_name(link)} has {speed} bytes per second; use a number above 0")
            for end in link:
                if isinstance(end, int) and not 0 <= end < self.num_ranks:
                    raise ValueError(
                        f"the link {_name(link)} names rank {end}; use 0 to {self.num_ranks - 1}"
                    )

    def routes(self) -> dict[tuple[int, int], Route]:
        """Return the links, in order, from each rank to each other rank. Raises ValueError if two ranks have no route."""
        return _routes(self)


def cables(num_ranks: int, speeds: Mapping[Link, float], ranks_per_node: int | None = None) -> Topology:
    """Make a Topology of cables: each entry of `speeds` becomes a link in each direction, with that speed."""
    both = tuple((link, speed) for (a, b), speed in speeds.items() for link in ((a, b), (b, a)))
    return Topology(num_ranks, both, ranks_per_node or num_ranks)


def nvswitch_nodes(machine: Machine, num_nodes: int = 1, cards: int | None = None) -> Topology:
    """Return nodes whose ranks share an NVSwitch. A network of unlimited bandwidth connects the nodes' network cards.

    cards   cards per node, each shared by equally many consecutive ranks; None: the machine's number

    Raises ValueError if `cards` does not divide the ranks of a node.
    """
    g, cards = machine.gpus_per_node, machine.cards_per_node if cards is None else cards
    require_positive(num_nodes=num_nodes)
    require_divides("cards", cards, "gpus_per_node", g)
    speeds: dict[Link, float] = {}
    for rank in range(num_nodes * g):
        node, place = divmod(rank, g)
        speeds[rank, f"switch {node}"] = machine.link_bytes_per_s
        if num_nodes > 1:
            card = f"card {node}.{place * cards // g}"
            speeds[rank, card] = speeds[card, "network"] = machine.card_bytes_per_s
    return cables(num_nodes * g, speeds, g)


def pcie_pairs(
    num_ranks: int = 8, pcie_bytes_per_s: float = 32e9, processor_bytes_per_s: float = 20e9
) -> Topology:
    """Return a node without NVLink: pairs of ranks on a PCIe switch, half of the pairs on each of two processors."""
    require_positive(num_ranks=num_ranks)
    if num_ranks % 4:
        raise ValueError(
            f"num_ranks={num_ranks}: two processors have as many pairs each; use a multiple of 4"
        )
    speeds: dict[Link, float] = {("processor 0", "processor 1"): processor_bytes_per_s}
    for rank in range(num_ranks):
        switch = f"pcie {rank // 2}"
        speeds[rank, switch] = speeds[switch, f"processor {2 * rank // num_ranks}"] = pcie_bytes_per_s
    return cables(num_ranks, speeds)


class Busiest(NamedTuple):
    """The link that takes longest to carry its bytes; `link` is None if nothing is sent."""

    link: Link | None
    num_bytes: int
    seconds: float


def link_bytes(
    topology: Topology, groups: Sequence[Sequence[int]], algorithm: str, num_bytes: int
) -> Counter[Link]:
    """Return the bytes on each link if every group all-reduces `num_bytes`.

    For "hierarchical": if every node has equally many members of a group, and these are consecutive in the group, the
    members on a node are the inner level. Otherwise the group is divided as the library does if nodes are unknown.
    Raises ValueError for a rank that does not exist.
    """
    routes = topology.routes()
    load: Counter[Link] = Counter()
    for group in groups:
        if outside := [rank for rank in group if not 0 <= rank < topology.num_ranks]:
            raise ValueError(f"rank {outside[0]} of a group is not there; use 0 to {topology.num_ranks - 1}")
        node_size = members_per_node(group, topology.ranks_per_node)
        for (a, b), sent in all_reduce_sends(algorithm, len(group), num_bytes, node_size).items():
            for link in routes[group[a], group[b]]:
                load[link] += sent
    return load


def busiest_link(topology: Topology, load: Mapping[Link, int]) -> Busiest:
    """Return the link that takes longest to carry its bytes; of equally slow links, the first."""
    busiest = Busiest(None, 0, 0.0)
    for link, speed in topology.speeds:
        if load.get(link, 0) / speed > busiest.seconds:
            busiest = Busiest(link, load[link], load[link] / speed)
    return busiest


@cache
def _routes(topology: Topology) -> dict[tuple[int, int], Route]:
    leaving: dict[Vertex, list[tuple[Vertex, float]]] = {}
    for (a, b), speed in topology.speeds:
        leaving.setdefault(a, []).append((b, speed))
    found = {}
    for source in range(topology.num_ranks):
        reached: dict[Vertex, tuple[float, Route]] = {source: (float("inf"), ())}
        frontier: list[Vertex] = [source]
        while frontier:
            farther: dict[Vertex, tuple[float, Route]] = {}
            for here in frontier:
                width, route = reached[here]
                for there, speed in leaving.get(here, []):
                    wide = min(width, speed)
                    if there not in reached and wide > farther.get(there, (0.0, ()))[0]:
                        farther[there] = (wide, (*route, (here, there)))
            reached |= farther
            frontier = [vertex for vertex in farther if not isinstance(vertex, int)]
        for rank in range(topology.num_ranks):
            if rank not in reached:
                raise ValueError(f"no route leads from rank {source} to rank {rank}; add links, or a switch")
            if rank != source:
                found[source, rank] = reached[rank][1]
    return found


def _name(link: Link) -> str:
    return f"from {link[0]} to {link[1]}"
