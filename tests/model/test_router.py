"""Who wins a place in an expert: the better score, and among scores equal but for rounding the earlier token."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.moe_config import MoEConfig
from minipar.model import MoE
from minipar.model import router as router_module
from minipar.model.groups import RoutingGroups
from minipar.model.router import TIE_TOLERANCE, expert_choice, nodes_used, tie_ranks, token_choice
from tests.strategies import seeds

CROWDED = [dict(router="expert_choice"), dict(drop_order="weight"), dict(drop_order="weight", top_k=2)]


def mixture(**options):
    return MoE(4, 3, 4, capacity_factor=0.5, **options).double()


def routed(moe, logits):
    """(expert, kept) of [B, T, E] logits, in groups of 8 tokens; no expert where the choice is dropped."""
    routing = moe.route(logits, RoutingGroups(*logits.shape[:2], 8))
    return routing.expert.masked_fill(~routing.kept, 4), routing


def runs_of_equal_tokens(seed):
    """[2, 16, 4] logits in which neighbouring tokens are alike, and the same logits as another mesh would round them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64).repeat_interleave(4, dim=1)
    rounding = torch.rand(logits.shape, generator=generator, dtype=torch.float64) - 0.5
    return logits, logits + 1e-13 * rounding


@pytest.mark.parametrize("options", CROWDED, ids=str)
@given(seed=seeds)
def test_equal_tokens_are_served_in_order_despite_rounding(options, seed):
    moe = mixture(**options)
    exact, rounded = runs_of_equal_tokens(seed)
    assert torch.equal(routed(moe, exact)[0], routed(moe, rounded)[0])


@pytest.mark.parametrize("options", CROWDED, ids=str)
def test_ranking_by_scores_themselves_is_noticed(options, monkeypatch):
    """A seeded fault: rounding, and so the mesh, decides which of a run of equal tokens are served."""
    monkeypatch.setattr(router_module, "tie_ranks", lambda scores, dim: -scores)
    moe = mixture(**options)
    differ = [
        not torch.equal(routed(moe, exact)[0], routed(moe, rounded)[0])
        for exact, rounded in map(runs_of_equal_tokens, range(5))
    ]
    assert any(differ)


@given(
    seed=seeds,
    shape=st.sampled_from([(0,), (1,), (9,), (3, 7)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_ranks_order_scores_and_join_those_within_the_tolerance(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 3, shape, generator=generator).to(dtype) / 4
    scores[scores < 0] = -torch.inf
    nudged = scores + 0.4 * TIE_TOLERANCE * (2 * torch.rand(shape, generator=generator) - 1).to(dtype)
    for ranks in (tie_ranks(scores, -1), tie_ranks(nudged, -1)):
        assert torch.equal(ranks[..., None] < ranks[..., None, :], scores[..., None] > scores[..., None, :])


def test_under_expert_choice_padding_takes_no_place():
    """Groups of 8 with room for 8: of a sequence of 11 tokens, the second group has 3, and each expert takes 3."""
    moe = MoE(4, 3, 4, capacity_factor=8.0, router="expert_choice", group_tokens=8).double()
    routing = routed(moe, torch.randn(2, 11, 4, dtype=torch.float64))[1]
    assert routing.load.tolist() == routing.kept_load.tolist() == [[8] * 4, [3] * 4] * 2
    real = torch.tensor([[False, True, True]])  # wherever it is, and whatever its scores
    expert, _ = expert_choice(torch.tensor([[[0.9], [0.1], [0.2]]]), real, capacity=2)
    assert expert.tolist() == [[[1], [0], [0]]]


def test_equal_experts_are_chosen_in_order_despite_rounding():
    probs = torch.full((4,), 0.25, dtype=torch.float64)
    for scores in (torch.zeros(4), torch.tensor([0.0, 1e-12, -1e-12, 2e-12])):
        assert token_choice(probs, scores, top_k=2)[0].tolist() == [0, 1]


def test_the_balance_bias_chooses_experts_without_weighing_them():
    moe = MoE(4, 3, 4, capacity_factor=None, balance_bias=True).double()
    moe.balance_bias[2] = 1.0
    logits = torch.randn(1, 8, 4, dtype=torch.float64)
    expert, routing = routed(moe, logits)
    assert expert.tolist() == [[2]] * 8
    assert torch.equal(routing.weight[:, 0], logits.softmax(-1)[0, :, 2])


def test_jitter_and_noise_differ_between_layers():
    """A seed's layers draw numbers of their own, or all routers would be wrong about a token together."""
    x, indices, samples = torch.ones(1, 6, 4, dtype=torch.float64), torch.arange(6), torch.arange(1)
    for options in (dict(jitter=0.3), dict(router="noisy_top_k")):
        first, second = (MoE(4, 3, 4, layer=layer, **options).double() for layer in (0, 1))
        second.load_state_dict(first.state_dict())
        assert torch.equal(
            first.eval().router(x, indices, samples), second.eval().router(x, indices, samples)
        )
        first.train(), second.train()
        assert not torch.equal(first.router(x, indices, samples), second.router(x, indices, samples))


def test_the_second_experts_use_probability_is_twice_its_weight():
    """Of 40,000 tokens of one distribution; in evaluation always. Left out, it takes no place and no load."""
    logits = torch.tensor([2.0, 0.5, -1.0, -1.5], dtype=torch.float64).expand(1, 40_000, 4)
    moe = MoE(4, 3, 4, top_k=2, capacity_factor=None, random_second=True).double()
    indices, samples = torch.arange(40_000), torch.arange(1)
    draw = moe.router.draw_second(indices, samples, step=3)
    routing = moe.route(logits, RoutingGroups(1, 40_000, 40_000), draw)
    p = 2 / (1 + math.exp(1.5))
    used = routing.kept[:, 1].double()
    assert abs(used.mean() - p) < 5 * math.sqrt(p * (1 - p) / 40_000)
    assert routing.load.tolist() == [[40_000, int(used.sum()), 0, 0]]
    assert torch.equal(routing.expert[:, 1] == 1, routing.kept[:, 1])
    assert moe.eval()(torch.randn(1, 8, 4, dtype=torch.float64))[1].load.sum() == 16


def test_equal_weights_use_both_experts_with_repeatable_draws():
    moe = MoE(4, 3, 4, top_k=2, capacity_factor=None, random_second=True).double()
    torch.nn.init.zeros_(moe.router.weight)
    assert moe(torch.randn(2, 64, 4, dtype=torch.float64))[1].load.tolist() == [128, 128, 0, 0]
    whole = moe.router.draw_second(torch.arange(6), torch.arange(4), step=1)
    part = moe.router.draw_second(torch.arange(3, 6), torch.tensor([2]), step=1)
    assert torch.equal(whole[2:3, 3:], part)
    assert not torch.equal(whole, moe.router.draw_second(torch.arange(6), torch.arange(4), step=2))


@given(seed=seeds, data=st.data())
def test_a_token_uses_the_best_experts_of_its_best_nodes(seed, data):
    nodes, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    limit, E = data.draw(st.integers(1, nodes)), nodes * each
    k = data.draw(st.integers(1, limit * each))
    options = dict(top_k=k, capacity_factor=None, expert_nodes=nodes, nodes_per_token=limit)
    logits = torch.randn(1, 8, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expert = MoE(4, 3, E, **options).double().route(logits, RoutingGroups(1, 8, 8)).expert
    assert nodes_used(expert, E, nodes).max() <= min(k, limit)
    for token, probs in zip(expert.tolist(), logits.softmax(-1)[0].tolist()):
        on = [probs[n * each : (n + 1) * each] for n in range(nodes)]
        goodness = [sum(sorted(p, reverse=True)[: math.ceil(k / limit)]) for p in on]
        best = sorted(range(nodes), key=lambda n: -goodness[n])[:limit]
        assert token == sorted((e for e in range(E) if e // each in best), key=lambda e: -probs[e])[:k]


@pytest.mark.parametrize(("E", "nodes", "k"), [(8, 4, 2), (8, 2, 3), (6, 3, 4), (4, 4, 1)])
def test_unlimited_experts_use_as_many_nodes_as_by_the_formula(E, nodes, k):
    every = torch.tensor(list(combinations(range(E), k)))
    want = nodes * (1 - math.comb(E - E // nodes, k) / math.comb(E, k))
    assert nodes_used(every, E, nodes).double().mean().item() == pytest.approx(want)
    assert nodes_used(torch.full((1, k), E), E, nodes).item() == 0


def copies_sent(world, x, expert, num_experts) -> tuple[int, int]:
    """Bytes of a dispatch that copies this rank's tokens once to each other rank, here a node; and what was received."""
    rank_of = expert // (num_experts // world.size)
    copies = [x[(rank_of == rank).any(1)] for rank in range(world.size)]
    sizes = world.all_gather(torch.tensor([len(c) for c in copies])).view(world.size, world.size)
    before = world.traffic.sent_bytes
    world.all_to_all(torch.cat(copies), sizes[world.rank].tolist(), sizes[:, world.rank].tolist())
    return world.traffic.sent_bytes - before, int(sizes[:, world.rank].sum())


def sent_between_nodes(world, limit) -> tuple[int, int, int]:
    """(bytes sent, bytes by the count of nodes, most rows a token may send) of 16 tokens with 2 of 8 experts."""
    options = {} if limit is None else dict(expert_nodes=world.size, nodes_per_token=limit)
    moe = MoE(4, 3, 8, top_k=2, capacity_factor=None, **options).double()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    logits = 3 * torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(7 + world.rank)).double()
    expert = moe.route(logits, RoutingGroups(1, 16, 16)).expert
    home = (expert // (8 // world.size) == world.rank).any(1)
    rows = int((nodes_used(expert, 8, world.size) - home.long()).sum())
    return copies_sent(world, x, expert, 8)[0], rows * 4 * 8, 16 * min(2, limit or 2) * 4 * 8


def test_each_used_node_is_sent_a_copy_and_a_limit_sends_fewer():
    totals = []
    for limit in (None, 1):
        counts = minipar.run(sent_between_nodes, limit, world_size=4)
        assert all(sent == counted <= most for sent, counted, most in counts)
        totals.append(sum(sent for sent, *_ in counts))
    assert totals[1] < totals[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(random_second=True, top_k=1), "random_second=True with top_k=1 .*; use top_k=2"),
        (dict(expert_nodes=2), "expert_nodes=2 with nodes_per_token=None: use both, or neither"),
        (dict(expert_nodes=3, nodes_per_token=1), "expert_nodes=3 does not divide num_experts=4"),
        (dict(expert_nodes=4, nodes_per_token=1, top_k=2), "nodes_per_token=1: top_k=2 .*; use 2 to 4"),
        (dict(expert_nodes=2, nodes_per_token=3), "nodes_per_token=3: .*; use 1 to 2"),
        (dict(expert_nodes=2, nodes_per_token=1, router="expert_choice"), "leave it out"),
    ],
)
def test_restrictions_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        MoEConfig(num_experts=4, **options)
