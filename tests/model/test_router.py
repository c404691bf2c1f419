"""Who wins a place in an expert: the better score, and among scores equal but for rounding the earlier token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.model import MoE
from minipar.model import router as router_module
from minipar.model.groups import RoutingGroups
from minipar.model.router import TIE_TOLERANCE, expert_choice, tie_ranks, token_choice
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
def test_of_equal_tokens_the_earlier_are_served_however_their_scores_are_rounded(options, seed):
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


def test_of_equal_experts_the_first_are_chosen_however_their_scores_are_rounded():
    probs = torch.full((4,), 0.25, dtype=torch.float64)
    for scores in (torch.zeros(4), torch.tensor([0.0, 1e-12, -1e-12, 2e-12])):
        assert token_choice(probs, scores, top_k=2)[0].tolist() == [0, 1]


def test_the_balance_bias_chooses_experts_and_does_not_weigh_their_outputs():
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
