"""The widest rings, and how many at once, against all there are."""

from collections import Counter
from itertools import combinations_with_replacement, permutations
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.extras.cost import rings
from minipar.extras.cost.rings import ring_width, rings_at_once, wide_ring, widest_ring
from minipar.extras.cost.topology import cables, nvswitch_nodes, pcie_pairs
from tests.examples import examples
from tests.extras.cost.test_topology import H100, graphs


def every_ring(topology):
    """(ranks, how often it uses each link) of every ring."""
    routes = topology.routes()
    for rest in permutations(range(1, topology.num_ranks)):
        ranks = (0, *rest)
        hops = zip(ranks, ranks[1:] + ranks[:1])
        yield ranks, Counter(link for hop in hops for link in routes.get(hop, ()))


@given(graphs())
@examples(60)
def test_the_widest_ring_is_the_widest_of_all_rings(topology):
    speeds = dict(topology.speeds)
    found = widest_ring(topology)
    widths = {
        ranks: min((speeds[link] / uses[link] for link in uses), default=float("inf"))
        for ranks, uses in every_ring(topology)
    }
    assert found.width == widths[found.ranks] == max(widths.values())
    assert all(ring_width(topology, ranks) == width for ranks, width in widths.items())


@given(graphs(max_ranks=4, max_speed=3), st.sampled_from([0.5, 1.0, 2.0]))
@examples(40)
def test_no_more_rings_fit_at_once_than_are_found(topology, width):
    found = rings_at_once(topology, width)
    if topology.num_ranks == 1:
        assert found == []
        return
    uses_of = dict(every_ring(topology))
    speeds = dict(topology.speeds)

    def fit(some) -> bool:
        uses = sum((uses_of[ranks] for ranks in some), Counter())
        return all(times * width <= speeds[link] for link, times in uses.items())

    assert fit(found)
    more = combinations_with_replacement(uses_of, len(found) + 1)
    assert not any(fit(some) for some in more)


def test_hops_that_share_a_link_share_its_speed():
    node = pcie_pairs(8, 32e9, 20e9)
    assert widest_ring(node).width == ring_width(node, tuple(range(8))) == 20e9
    assert ring_width(node, (0, 4, 1, 5, 2, 6, 3, 7)) == 5e9


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_two_nodes_have_as_many_rings_at_once_as_a_node_has_cards(cards):
    nodes = nvswitch_nodes(H100, 2, cards)
    assert widest_ring(nodes).width == H100.card_bytes_per_s
    found = rings_at_once(nodes, H100.card_bytes_per_s)
    assert len(found) == cards
    leaving = [sum(a // 8 != b // 8 for a, b in zip(ranks, ranks[1:] + ranks[:1])) for ranks in found]
    assert leaving == [2] * cards


def test_one_rank_passes_messages_to_nobody():
    assert widest_ring(cables(1, {})) == ((0,), float("inf"))


def test_bad_input_is_one_line_that_says_what_would_work():
    with pytest.raises(ValueError, match=r"width=0 bytes per second; use a number above 0"):
        rings_at_once(pcie_pairs(), 0)
    with mock.patch.object(rings, "MAX_HOPS", 5), pytest.raises(ValueError, match="num_ranks=8.*fewer ranks"):
        widest_ring(pcie_pairs())


@given(graphs())
@examples(40)
def test_a_ring_found_by_moves_is_no_wider_than_the_widest(topology):
    found = wide_ring(topology, exact_up_to=2)
    assert sorted(found.ranks) == list(range(topology.num_ranks))
    assert found.ranks[0] == 0
    assert found.width == ring_width(topology, found.ranks) <= widest_ring(topology).width


def test_a_ring_over_shuffled_nodes_is_as_wide_as_the_drawn_one():
    """32 ranks on pairs of PCIe switches, numbered at random: in rank order the processors share many hops."""
    order = sorted(range(32), key=lambda rank: rank * 7919 % 101)
    drawn = {
        tuple(order[end] if isinstance(end, int) else end for end in link): speed
        for link, speed in pcie_pairs(32).speeds
    }
    shuffled = cables(32, drawn)
    found = wide_ring(shuffled)
    assert found.width == ring_width(pcie_pairs(32), tuple(range(32)))
    assert found.width > 4 * ring_width(shuffled, tuple(range(32)))


def test_a_comm_goes_around_the_ring_in_its_order():
    """Each rank sends to the next of the ring, and the sum is that of any order."""
    ranks = (0, 2, 1, 3)

    def around(world):
        comm = world.subgroup(ranks, "wide ring")
        total = comm.all_reduce(torch.tensor([2.0**world.rank] * 4), algorithm="ring")
        return total.tolist(), comm.ranks[(comm.rank + 1) % comm.size]

    found = minipar.run(around, world_size=4)
    assert [total for total, _ in found] == [[15.0] * 4] * 4
    assert {rank: after for rank, (_, after) in enumerate(found)} == {0: 2, 2: 1, 1: 3, 3: 0}
