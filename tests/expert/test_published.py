"""Numbers that DeepSpeed-MoE gives of all-to-alls: reproduced."""

from __future__ import annotations

import torch

import minipar
from minipar.expert.overlapped_all_to_all import AllToAllRoute

FLOAT = 4

# DeepSpeed-MoE, arXiv:2201.05596: a hierarchical all-to-all takes O(G + p/G) hops instead of O(p), and twice the volume -


def hops(world, node_size: int | None, rows: int) -> tuple[int, int]:
    """The messages and bytes that this rank sends to bring `rows` rows to each rank."""
    route = AllToAllRoute(world, node_size)
    world.traffic.reset()
    route.begin(torch.zeros(rows * world.size, 3), [[rows] * world.size] * world.size, async_op=False)
    return world.traffic.messages, world.traffic.sent_bytes


def test_two_levels_cut_hops_and_at_most_double_the_bytes():
    p, rows = 8, 2
    row = 3 * FLOAT
    assert minipar.run(hops, None, rows, world_size=p) == [(p - 1, (p - 1) * rows * row)] * p
    for g in (2, 4):
        nodes = p // g
        to_other_ranks, to_other_nodes = (g - 1) * nodes * rows, (nodes - 1) * g * rows
        want = (g - 1) + (nodes - 1), (to_other_ranks + to_other_nodes) * row
        assert minipar.run(hops, g, rows, world_size=p) == [want] * p
        assert want[1] < 2 * (p - 1) * rows * row
