"""The bandwidth that a group along a mesh axis really gets, inside a node and between nodes.

Nodes are blocks of consecutive ranks. A group along an axis of stride s and size n has g members on each node it spans. Its
ring leaves each node once, and that hop carries as many bytes as every other hop of the ring. On a node of
G GPUs, G/g such groups share the node's cards, so each group leaves the node through its share of *all* the cards:

    bytes per second that a group takes out of a node = cards * bytes per second of a card * g / G

A group with eight members on a node of eight GPUs and eight cards leaves the node through eight cards, not one: NCCL makes
several rings, and each enters and leaves a node by a different card.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from minipar.cost.collectives import _SHARES, sent_share
from minipar.cost.collectives import collective_s as ring_s
from minipar.cost.layout import Layout
from minipar.cost.machines import Machine

# The fraction of a link's speed that large collectives reach (Machine Learning Engineering Open Book, network).
LINK_FRACTION = 0.8

# Fitted to NCCL's published curves (benchmarks/planner/nccl_curves.py).
FILL = 0.6

# NVLink SHARP: the latency of its two directions (NCCL, src/graph/tuning.cc), and the largest number of GPUs for which NCCL
# still prefers a ring (Machine Learning Engineering Open Book, network, "SHARP").
SWITCH_LATENCY_S = 25e-6
SWITCH_GPUS = 4


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


def axis_links(machine: Machine, layout: Layout, axis: str, fold_experts: bool = False) -> Links:
    """Return the links of an axis: tp, cp, pp, ep, dp or edp.

    Dense gradients are summed over dp (here dp x cp ranks), expert gradients over edp (dp x cp / ep ranks, or with
    `fold_experts` tp times as many).
    """
    data, across = layout.dp * layout.cp, 1 if fold_experts else layout.tp
    size = {
        "tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp, "dp": data,
        "edp": data * layout.tp // across // layout.ep,
    }[axis]  # fmt: skip
    stride = {
        "tp": 1, "cp": layout.tp, "ep": across, "dp": layout.tp, "edp": across * layout.ep, "pp": data * layout.tp,
    }[axis]  # fmt: skip
    return links_of(machine, size, stride)


def collective_s(machine: Machine, links: Links, kind: str, num_bytes: float) -> float:
    """Return the time of a collective over a group with these links; `num_bytes` is the size of the whole vector.

    A ring uses all its links at once and runs at the speed of the slowest. In an all-to-all, each rank sends its bytes for
    other nodes through its own share of the cards.
    """
    if links.size == 1:
        return 0.0
    if machine.collectives is not None:
        return ring_s(kind, links.size, num_bytes, *machine.collectives[kind])
    return message_s(*latency_and_bytes_s(machine, links, kind, num_bytes))


def latency_and_bytes_s(machine: Machine, links: Links, kind: str, num_bytes: float) -> tuple[float, float]:
    """Return the two terms of a collective's time: the latency of its hops, and its bytes on the slowest link."""
    n, nodes = links.size, links.nodes
    sent = sent_share(kind, n) * num_bytes
    if kind == "all_to_all":
        away = (n - links.per_node) / (n - 1) * sent
        own_card = links.between / links.per_node
        seconds = max((sent - away) / links.inside, away / own_card)
    else:
        inside, between = _rates(machine, links, kind)
        seconds = sent / min([inside] * (links.per_node > 1) + [between] * (nodes > 1))
    return machine.start_latency_s + _latency_s(machine, links, kind), seconds


def message_s(latency_s: float, bytes_s: float, fill: float = FILL) -> float:
    """Return the time of a message whose first byte takes latency_s to arrive, and whose bytes take bytes_s on the links.

    A message is sent in chunks. With many small chunks every hop starts early but pays its latency often; with few large
    ones hops wait for whole chunks. The best chunk leaves latency + bytes + 2 sqrt(latency bytes); NCCL, which has several
    chunks under way, is nearer to the sum: `fill` of that root is fitted to its published curves.
    """
    return latency_s + bytes_s + fill * sqrt(latency_s * bytes_s)


def _in_switch(machine: Machine, links: Links, kind: str) -> bool:
    """Return whether the node's switch adds up the vectors: NCCL does so for all-reduces of more than 4 GPUs of a node."""
    return kind == "all_reduce" and machine.switch_speedup > 1 and links.per_node > SWITCH_GPUS


def _rates(machine: Machine, links: Links, kind: str) -> tuple[float, float]:
    """Return the bytes per second, in the units of a ring, of a group's links inside a node and between nodes.

    Over two nodes an all-reduce sends each byte across once in each direction, as in a tree, not twice as in a ring.
    """
    inside = links.inside * (machine.switch_speedup if _in_switch(machine, links, kind) else 1.0)
    return inside, links.between * (2 if kind == "all_reduce" and links.nodes == 2 else 1)


def _latency_s(machine: Machine, links: Links, kind: str) -> float:
    """Return the latency of the hops of a ring or, for an all-reduce, of a tree or of the switch if that is lower."""
    rounds, nodes = _SHARES[kind], links.nodes
    far = rounds * (nodes - 1)
    ring = far * machine.network_latency_s + (rounds * (links.size - 1) - far) * machine.link_latency_s
    if kind != "all_reduce":
        return ring
    depth = (nodes - 1).bit_length()
    inside = (links.per_node - 1) * machine.link_latency_s
    if nodes == 1 and _in_switch(machine, links, kind):
        inside = min(inside, SWITCH_LATENCY_S / 2)
    return min(ring, 2 * (inside + depth * machine.network_latency_s))


def send_s(machine: Machine, layout: Layout, num_bytes: float) -> float:
    """Return the time of a message from one pipeline rank to the next."""
    if machine.collectives is not None:
        alpha, beta = machine.collectives["send"]
        return alpha + beta * num_bytes
    links = axis_links(machine, layout, "pp")
    if links.per_node == links.size:
        to_one = links.inside / (links.size - 1) if machine.pairs else links.inside
        return message_s(machine.start_latency_s + machine.link_latency_s, num_bytes / to_one)
    own_card = links.between / links.per_node
    return message_s(machine.start_latency_s + machine.network_latency_s, num_bytes / own_card)
