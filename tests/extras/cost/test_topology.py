"""Links as a graph: routes, the bytes that an all-reduce puts on each link, the plans' messages against real ranks'."""

from collections import Counter
from itertools import permutations
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import minipar
from minipar.cost.machines import find_machine
from minipar.extras.cost.message_plans import PLANS, all_reduce_sends
from minipar.extras.cost.topology import (
    Topology,
    busiest_link,
    cables,
    link_bytes,
    nvswitch_nodes,
    pcie_pairs,
)
from minipar.mesh.nodes import members_per_node
from tests.examples import examples

H100 = find_machine("h100")


@st.composite
def graphs(draw, max_ranks: int = 5, max_speed: int = 4) -> Topology:
    """Ranks, each on one or both of two switches, which are joined, and some cables between ranks."""
    p = draw(st.integers(1, max_ranks))
    speeds = st.integers(1, max_speed).map(float)
    joined = {("left", "right"): draw(speeds)}
    sides = st.sampled_from([["left"], ["right"], ["left", "right"]])
    joined |= {(rank, side): draw(speeds) for rank in range(p) for side in draw(sides)}
    pairs = [(a, b) for a in range(p) for b in range(a)]
    direct = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return cables(p, joined | {pair: draw(speeds) for pair in direct}, draw(st.integers(1, p)))


@given(graphs())
@examples(50)
def test_a_route_has_the_fewest_links_and_of_those_the_widest(topology):
    speeds = dict(topology.speeds)
    for (a, b), route in topology.routes().items():
        ways = [(a, *inner, b) for n in range(3) for inner in permutations(["left", "right"], n)]
        ways = [tuple(zip(way, way[1:])) for way in ways]
        ways = [way for way in ways if all(link in speeds for link in way)]
        assert route in ways
        assert (-len(route), min(speeds[x] for x in route)) == max(
            (-len(way), min(speeds[x] for x in way)) for way in ways
        )


@given(st.data(), graphs(), st.sampled_from(list(PLANS)), st.integers(0, 100))
@examples(50)
def test_busiest_link_bytes_are_a_count_of_the_plans_messages(data, topology, algorithm, num_bytes):
    order = data.draw(st.permutations(range(topology.num_ranks)))
    cut = data.draw(st.integers(1, topology.num_ranks))
    groups = [group for group in (order[:cut], order[cut:]) if group]
    load = link_bytes(topology, groups, algorithm, num_bytes)
    counted = {}
    for link, speed in topology.speeds:
        num = sum(
            sent
            for group in groups
            for (a, b), sent in all_reduce_sends(
                algorithm, len(group), num_bytes, members_per_node(group, topology.ranks_per_node)
            ).items()
            if link in topology.routes()[group[a], group[b]]
        )
        assert load[link] == num
        counted[link] = (num / speed, num)
    busiest = busiest_link(topology, load)
    assert busiest.seconds == max(seconds for seconds, _ in counted.values())
    if busiest.link:
        assert counted[busiest.link] == (busiest.seconds, busiest.num_bytes)


def sent_by(world, calls) -> list[Counter]:
    """What this rank really sends to each rank of the world: the transport's messages, counted as they are posted."""
    found, transport = [], type(world._transport)
    post = transport.post

    def noted(self, channel, kind, x, to, *rest):
        if to is not None and x.numel():
            found[-1][world.rank, channel.key.ranks[to]] += x.nbytes
        return post(self, channel, kind, x, to, *rest)

    with mock.patch.object(transport, "post", noted):
        for algorithm, n in calls:
            found.append(Counter())
            world.all_reduce(torch.zeros(n, dtype=torch.uint8), algorithm=algorithm)
    return found


calls = st.tuples(st.sampled_from(list(PLANS)), st.integers(0, 50))


@given(st.integers(1, 8), st.lists(calls, min_size=6, max_size=12))
@examples(4)
@example(4, [("hierarchical", 9)])  # 9 bytes in 4 chunks: 3, 3, 3, 0
def test_a_plans_messages_are_those_that_real_ranks_send(size, calls):
    ranks = minipar.run(sent_by, calls, world_size=size)
    for (algorithm, n), by_rank in zip(calls, zip(*ranks)):
        assert sum(by_rank, Counter()) == all_reduce_sends(algorithm, size, n)


def test_a_plan_with_a_message_less_is_told_from_the_real_ranks():
    ranks = minipar.run(sent_by, [("tree", 24)], world_size=4)
    sends = all_reduce_sends("tree", 4, 24)
    assert sum((rank[0] for rank in ranks), Counter()) == sends
    del sends[next(iter(sends))]
    assert sum((rank[0] for rank in ranks), Counter()) != sends


@pytest.mark.parametrize("algorithm", PLANS)
@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_every_algorithm_sends_the_same_bytes_in_all(algorithm, p):
    assert sum(all_reduce_sends(algorithm, p, 48 * p).values()) == 2 * (p - 1) * 48 * p


@pytest.mark.parametrize("cards", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_ring_uses_one_card_of_a_node_and_two_levels_use_all(nodes, cards):
    topology = nvswitch_nodes(H100, nodes, cards)
    p, n = topology.num_ranks, 3200
    for algorithm, each, used in (
        ("ring", 2 * (p - 1) * n // p, 1),
        ("hierarchical", 2 * (nodes - 1) * n // nodes // cards, cards),
    ):
        load = link_bytes(topology, [range(p)], algorithm, n)
        on_cards = [load[link] for link, _ in topology.speeds if link[1] == "network" and load[link]]
        assert on_cards == [each] * used * nodes


def test_tp_on_the_slow_link_is_seen_as_the_placement_that_it_is():
    topology = nvswitch_nodes(H100, 2, 1)
    inside = [range(8), range(8, 16)]
    across = [range(start, 16, 2) for start in (0, 1)]
    busy = [busiest_link(topology, link_bytes(topology, groups, "ring", 1600)) for groups in (inside, across)]
    assert busy[0].link == (0, "switch 0")
    assert busy[1].link == ("card 0.0", "network")
    assert (busy[0].num_bytes, busy[1].num_bytes) == (2800, 2 * 2800)  # two rings share the card
    assert busy[1].seconds == 18 * busy[0].seconds


REFUSED = {
    "cards=3 does not divide gpus_per_node=8; use 1, 2, 4 or 8": lambda: nvswitch_nodes(H100, 2, 3),
    "num_nodes=0; use": lambda: nvswitch_nodes(H100, 0),
    "num_ranks=6.*multiple of 4": lambda: pcie_pairs(6),
    "from 0 to s has 0.0 bytes per second": lambda: cables(1, {(0, "s"): 0.0}),
    "from 0 to 7 names rank 7; use 0 to 1": lambda: cables(2, {(0, 7): 1.0}),
    "no route leads from rank 0 to rank 1": lambda: cables(2, {(0, "s"): 1.0}).routes(),
    "rank 9 of a group": lambda: link_bytes(pcie_pairs(), [[0, 9]], "ring", 8),
    "algorithm='rings' has no plan.*did you mean ring": lambda: all_reduce_sends("rings", 2, 8),
    "num_bytes=-1; use 0": lambda: all_reduce_sends("ring", 2, -1),
    "node_size=3 does not divide": lambda: all_reduce_sends("hierarchical", 8, 8, 3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_that_says_what_would_work(words):
    with pytest.raises(ValueError, match=words) as caught:
        REFUSED[words]()
    assert "\n" not in str(caught.value)
