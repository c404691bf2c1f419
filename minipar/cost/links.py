"""The bandwidth that a group along a mesh axis really gets, inside a node and between nodes.

Nodes are blocks of consecutive ranks. A group along an axis of stride s and size n has g members on each node it spans. Its
ring leaves each node once, and that hop carries as many bytes as every other hop of the ring. On a node of
G GPUs, G/g such groups share the node's cards, so each group leaves the node through its share of *all* the cards:

    bytes per second that a group takes out of a node = cards * bytes per second of a card * g / G

A group with eight members on a node of eight GPUs and eight cards leaves the node through eight cards, not one: NCCL makes
several rings, and each enters and leaves a node by a different card.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.cost.collectives import _SHARES, sent_share
from minipar.cost.collectives import collective_s as ring_s
from minipar.cost.layout import Layout
from minipar.cost.machines import Machine

# The fraction of a link's speed that large collectives reach (Machine Learning Engineering Open Book, network).
LINK_FRACTION = 0.8


class Links(NamedTuple):
    """The links of a group of `size` ranks, `per_node` of them on each node.

    inside   bytes per second from a rank to the other ranks on its node
    between  bytes per second from the group's ranks on a node to other nodes
    """

    size: int
    per_node: int
    inside: float
    between: float

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    @property
    def leaving_share(self) -> float:
        """The fraction of a ring's messages that go to another node."""
        return 1 / self.per_node if self.nodes > 1 else 0.0


def links_of(machine: Machine, size: int, stride: int) -> Links:
    """Return the links of a group of `size` ranks that are `stride` apart."""
    gpus = machine.gpus_per_node
    per_node = max(1, min(size, gpus // stride))
    # Where the group cannot fill its nodes evenly, take the next smaller number per node that divides its size.
    while size % per_node:
        per_node -= 1
    cards = machine.cards_per_node * machine.card_bytes_per_s
    reached = (per_node - 1) / (gpus - 1) if machine.pairs else 1.0
    return Links(
        size,
        per_node,
        machine.share * machine.link_bytes_per_s * reached,
        machine.share * cards * per_node / gpus,
    )


def axis_links(machine: Machine, layout: Layout, axis: str) -> Links:
    """Return the links of an axis: tp, cp, pp, ep, dp or edp.

    Dense gradients are summed over dp (here dp x cp ranks), expert gradients over edp (dp x cp / ep ranks).
    """
    size = {
        "tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": layout.dp * layout.cp,
        "edp": layout.dp * layout.cp // layout.ep,
    }[axis]  # fmt: skip
    stride = {
        "tp": 1, "cp": layout.tp, "ep": layout.tp, "dp": layout.tp, "edp": layout.tp * layout.ep,
        "pp": layout.dp * layout.cp * layout.tp,
    }[axis]  # fmt: skip
    return links_of(machine, size, stride)


def collective_s(machine: Machine, links: Links, kind: str, num_bytes: float) -> float:
    """Return the time of a collective over a group with these links; `num_bytes` is the size of the whole vector.

    A ring uses all its links at once and runs at the speed of the slowest. In an all-to-all, each rank sends its bytes for
    other nodes through its own share of the cards. The latency is that of a ring's hops; for an all-reduce, that of a
    tree's hops if it is lower.
    Source: NCCL, src/graph/tuning.cc.
    """
    if links.size == 1:
        return 0.0
    if machine.collectives is not None:
        return ring_s(kind, links.size, num_bytes, *machine.collectives[kind])
    n, nodes, rounds = links.size, links.nodes, _SHARES[kind]
    sent = sent_share(kind, n) * num_bytes
    if kind == "all_to_all":
        away = (n - links.per_node) / (n - 1) * sent
        own_card = links.between / links.per_node
        seconds = max((sent - away) / links.inside, away / own_card)
    else:
        rates = [links.inside] * (links.per_node > 1) + [links.between] * (nodes > 1)
        seconds = sent / min(rates)
    far = rounds * (nodes - 1)
    ring = far * machine.network_latency_s + (rounds * (n - 1) - far) * machine.link_latency_s
    if kind == "all_reduce":
        depth = (nodes - 1).bit_length()
        tree = 2 * ((links.per_node - 1) * machine.link_latency_s + depth * machine.network_latency_s)
        ring = min(ring, tree)
    return machine.start_latency_s + ring + seconds


def send_s(machine: Machine, layout: Layout, num_bytes: float) -> float:
    """Return the time of a message from one pipeline rank to the next."""
    if machine.collectives is not None:
        alpha, beta = machine.collectives["send"]
        return alpha + beta * num_bytes
    links = axis_links(machine, layout, "pp")
    if links.per_node == links.size:
        to_one = links.inside / (links.size - 1) if machine.pairs else links.inside
        return machine.start_latency_s + machine.link_latency_s + num_bytes / to_one
    own_card = links.between / links.per_node
    return machine.start_latency_s + machine.network_latency_s + num_bytes / own_card
