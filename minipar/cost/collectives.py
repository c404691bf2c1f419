"""Time of a collective by the alpha-beta model: latency per message, and bytes over bandwidth.

p is the number of ranks, n the bytes of the whole vector: an all-gather's result, a rank's input to an all-to-all.

    all-reduce, ring          2 (p-1) alpha + 2 (p-1)/p n beta
    reduce-scatter, ring      (p-1) alpha + (p-1)/p n beta
    all-gather, ring          (p-1) alpha + (p-1)/p n beta
    all-to-all, pairwise      (p-1) alpha + (p-1)/p n beta
    broadcast, binomial       ceil(lg p) (alpha + n beta)
    all-reduce, Rabenseifner  2 lg p alpha + 2 (p-1)/p n beta        for p a power of two

Source: Thakur, Rabenseifner and Gropp, 2005, section 4. The time of additions (gamma in the source) is left out.
"""

from __future__ import annotations

from math import ceil, log2

# The bytes that a rank sends, in units of (p-1)/p n; also the rounds of a ring, in units of p-1.
_SHARES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


def sent_share(kind: str, p: int) -> float:
    """Return the fraction of the whole vector that each rank sends."""
    return _SHARES[kind] * (p - 1) / p


def collective_s(
    kind: str, p: int, num_bytes: float, alpha: float, beta: float, algorithm: str = "ring"
) -> float:
    """Return the time of one collective over p ranks: alpha seconds per message, beta seconds per byte."""
    if p == 1:
        return 0.0
    rounds = ceil(log2(p))
    if kind == "broadcast":
        return rounds * (alpha + num_bytes * beta)
    if algorithm == "halving_doubling":
        return _SHARES[kind] * rounds * alpha + sent_share(kind, p) * num_bytes * beta
    return _SHARES[kind] * (p - 1) * alpha + sent_share(kind, p) * num_bytes * beta


def hierarchical_all_reduce_s(
    nodes: int, per_node: int, num_bytes: float, fast: tuple[float, float], slow: tuple[float, float]
) -> float:
    """Return the time of a hierarchical all-reduce.

    It is a reduce-scatter inside each node, an all-reduce of each part between nodes, and an all-gather inside each node.

    fast  (alpha, beta) of the links inside a node
    slow  (alpha, beta) of each rank's own link to other nodes

    With k nodes of g ranks, it sends 2(k-1)/k n/g bytes over a slow link; a flat ring sends 2(kg-1)/(kg) n.
    """
    inside = 2 * collective_s("all_gather", per_node, num_bytes, *fast)
    return inside + collective_s("all_reduce", nodes, num_bytes / per_node, *slow)
