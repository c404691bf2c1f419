"""The widest rings, and how many at once, against all there are."""

from collections import Counter
from itertools import combinations_with_replacement, permutations
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar.cost import rings
from minipar.cost.rings import ring_width, rings_at_once, widest_ring
from minipar.cost.topology import cables, nvswitch_nodes, pcie_pairs
from tests.cost.test_topology import H100, graphs


def every_ring(topology):
    """(ranks, how often it uses each link) of every ring."""
    routes = topology.routes()
    for rest in permutations(range(1, topology.num_ranks)):
        ranks = (0, *rest)
        hops = zip(ranks, ranks[1:] + ranks[:1])
        yield ranks, Counter(link for hop in hops for link in routes.get(hop, ()))


@given(graphs())
@settings(max_examples=60)
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
@settings(max_examples=40)
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
