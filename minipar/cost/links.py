"""The links that a mesh axis really has.

Nodes are blocks of consecutive ranks. A group along an axis of stride s and size n has g members on each node that it
touches. Its ring crosses from node to node once per node, with the bytes that any of its links carries; and the G/g groups
that share a node of G GPUs share its cards. So a group leaves a node through its share of *all* the node's cards:

    bytes per second that a group takes out of a node = cards * bytes per second of a card * g / G

A group with eight members on a node of eight GPUs and eight cards leaves it through eight cards, not one: NCCL makes
several rings, each entering and leaving a node by another card.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.cost.collectives import _SHARES, sent_share
from minipar.cost.collectives import collective_s as ring_s
from minipar.cost.layout import Layout
from minipar.cost.machines import Machine

# Of a link's speed, what large collectives reach (Machine Learning Engineering Open Book, network): a machine's default.
LINK_FRACTION = 0.8


class Links(NamedTuple):
    """A group of `size` ranks, `per_node` of them on each node, and the bytes per second and rank inside and between."""

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
    # A group that does not fill its nodes evenly is taken to have fewer members on each.
    while size % per_node:
        per_node -= 1
    cards = machine.cards_per_node * machine.card_bytes_per_s
    return Links(
        size, per_node, machine.share * machine.link_bytes_per_s, machine.share * cards * per_node / gpus
    )


def axis_links(machine: Machine, layout: Layout, axis: str) -> Links:
    """Return the links of an axis: tp, cp, pp, ep, dp (dp x cp, where dense gradients are summed), edp (experts')."""
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
    """Return the seconds of a collective of `num_bytes`, the whole vector, over a group with these links.

    A ring moves its bytes over all links at once, at the slowest of them. An all-to-all sends each rank's bytes for other
    nodes over its own share of the cards. Latency: a ring's hops or, for an all-reduce, those of a tree, if they are fewer.
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
    """Return the seconds of a message from one pipeline rank to the next."""
    if machine.collectives is not None:
        alpha, beta = machine.collectives["send"]
        return alpha + beta * num_bytes
    links = axis_links(machine, layout, "pp")
    if links.per_node == links.size:
        return machine.start_latency_s + machine.link_latency_s + num_bytes / links.inside
    own_card = links.between / links.per_node
    return machine.start_latency_s + machine.network_latency_s + num_bytes / own_card
