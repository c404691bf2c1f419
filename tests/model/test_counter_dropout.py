"""A mask is a function of what is dropped: it looks random, and is the same however the batch is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, counter_dropout, dropout
from minipar.model.counter_dropout import keep_mask, uniform
from tests.strategies import assert_equal_to, seeds

KEY = (7, 3, 1, 0)  # seed, step, layer, site


def mask(p=0.5, key=KEY, B=16, T=32, D=128, **kwargs):
    return keep_mask(D, p, key, torch.arange(B), torch.arange(T), **kwargs).double()


def deviations(rate: float, p: float, n: int) -> float:
    """How many standard deviations the mean of n fair draws is away from what it should be."""
    return abs(rate - (1 - p)) / (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**40, -5])
def test_the_share_of_kept_elements_is_one_minus_p(p, seed):
    kept = mask(p, key=(seed, 0, 0, 0))
    assert deviations(kept.mean().item(), p, kept.numel()) < 5
    for dim in range(3):  # no sample, position or feature is favoured
        others = [d for d in range(3) if d != dim]
        n = kept.numel() // kept.shape[dim]
        assert max(deviations(r, p, n) for r in kept.mean(others).tolist()) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("word", range(len(KEY)))
def test_masks_of_neighbouring_keys_are_independent(p, word):
    first = mask(p)
    for distance in (1, 2, 256, 2**32):
        other = list(KEY)
        other[word] += distance
        both = first * mask(p, key=tuple(other))
        assert deviations(both.mean().item(), 1 - (1 - p) ** 2, both.numel()) < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbouring_samples_positions_and_features_are_independent(p, dim):
    kept = mask(p)
    for distance in (1, 2, 8):
        n = kept.shape[dim] - distance
        both = kept.narrow(dim, 0, n) * kept.narrow(dim, distance, n)
        # products of overlapping pairs are not quite independent draws; the bound leaves room
        assert deviations(both.mean().item(), 1 - (1 - p) ** 2, both.numel()) < 6


def test_words_do_not_stand_in_for_each_other():
    """Seed 1 of step 2 is not seed 2 of step 1, sample 3 at 5 is not sample 5 at 3."""
    assert not torch.equal(mask(key=(1, 2, 3, 4)), mask(key=(2, 1, 3, 4)))
    assert not torch.equal(mask(key=(1, 2, 3, 4)), mask(key=(1, 2, 4, 3)))
    square = mask(B=16, T=16)
    assert not torch.equal(square, square.transpose(0, 1))


@given(data=st.data(), seed=seeds)
def test_any_part_of_a_batch_has_its_part_of_the_mask(data, seed):
    B, T, D = 4, 6, 8
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed))
    key = (seed, *data.draw(st.tuples(st.integers(0, 2**40), st.integers(0, 99), st.integers(0, 1))))
    samples = torch.tensor(
        data.draw(st.permutations(range(B)))[: data.draw(st.integers(0, B))], dtype=torch.int64
    )
    places = torch.tensor(
        data.draw(st.permutations(range(T)))[: data.draw(st.integers(0, T))], dtype=torch.int64
    )
    start, stop = sorted(data.draw(st.tuples(st.integers(0, D), st.integers(0, D))))
    whole = dropout(x, 0.3, *key, torch.arange(B), torch.arange(T))
    part = x[samples][:, places][..., start:stop]
    if data.draw(st.booleans(), "positions per sample"):
        places = places.expand(len(samples), -1)
    got = dropout(part, 0.3, *key, samples, places, feature_offset=start)
    want = whole[samples][:, places if places.dim() == 1 else places[0] if len(samples) else []]
    assert torch.equal(got, want[..., start:stop].reshape(got.shape))


def test_positions_counted_from_zero_on_every_rank_are_noticed():
    """A seeded fault: a rank that holds the second half of a sequence numbers it from 0."""
    whole = mask(T=32)
    assert not torch.equal(mask(T=16), whole[:, 16:])


def test_the_gradient_passes_where_the_value_did_and_both_are_scaled():
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, *KEY, torch.arange(2), torch.arange(5))
    y.sum().backward()
    assert_equal_to(y.detach(), x.detach() * x.grad)
    assert set(x.grad.unique().tolist()) == {0.0, 1 / 0.75}


def test_one_byte_an_element_is_kept_for_the_backward():
    x, kept = torch.randn(2, 5, 7, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        dropout(x, 0.25, *KEY, torch.arange(2), torch.arange(5))
    assert sum(kept) == x.numel()


def test_every_site_of_every_layer_has_a_mask_of_its_own(monkeypatch):
    keys = []

    def record(x, p, *key_and_place):
        keys.append((p, *key_and_place[:4]))
        return x

    monkeypatch.setattr("minipar.model.block.counter_dropout", record)
    config = ModelConfig(vocab_size=11, dim=8, num_layers=3, num_heads=2, dropout=0.5)
    Transformer(config, seed=9, layers=[1, 2], last=False)(torch.randint(11, (2, 4)), step=6)
    assert keys == [(0.5, 9, 6, layer, site) for layer in (1, 2) for site in (0, 1)]


def halves_that_are_alike(**options) -> torch.Tensor:
    """Logits of one text twice in a sample, as two documents: [2, 8, V]."""
    config = ModelConfig(
        vocab_size=11, dim=8, num_layers=2, num_heads=2, max_seq_len=16, documents=True, **options
    )
    tokens = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    positions = torch.arange(8).repeat(2)
    return Transformer(config, seed=1).double()(tokens, positions=positions)[0].unflatten(0, (2, 8)).detach()


def test_documents_in_a_sample_have_their_own_masks_and_noise():
    experts = dict(num_experts=4, moe_every=1, capacity_factor=None, top_k=2)
    first, second = halves_that_are_alike(**experts)
    assert_equal_to(first, second)
    for random in (dict(dropout=0.5), dict(jitter=0.5, **experts), dict(router="noisy_top_k", **experts)):
        first, second = halves_that_are_alike(**random)
        assert (first != second).any(-1).all()


@pytest.mark.parametrize("largest", [0, 2**32 - 1])
def test_uniform_numbers_are_never_0_or_1(largest, monkeypatch):
    """A router's noise would be infinite. In float32 the largest hash would give 1."""
    monkeypatch.setattr(counter_dropout, "_hash", lambda *args: torch.tensor([largest]))
    number = uniform(1, KEY, torch.arange(1), torch.arange(1))
    assert number.dtype == torch.float64
    assert 0 < number < 1
    assert torch.special.ndtri(number).float().isfinite()


def test_a_model_drops_in_training_only_and_by_seed_step_and_sample():
    config = ModelConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, max_seq_len=8, dropout=0.5)
    model, tokens = Transformer(config, seed=1), torch.randint(11, (3, 8))
    again, other_step = model(tokens, step=4), model(tokens, step=5)
    assert torch.equal(model(tokens, step=4), again)
    assert not torch.equal(other_step, again)
    assert torch.equal(model(tokens[1:], sample_ids=torch.tensor([1, 2]), step=4), again[1:])
    assert not torch.equal(model(tokens[1:], step=4), again[1:])
    plain = Transformer(ModelConfig(**{**vars(config), "dropout": 0.0}), seed=1)
    assert torch.equal(model.eval()(tokens, step=4), plain(tokens))
