"""A model that keeps keys and values computes what the model computes that reads everything anew."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, attention, flash
from minipar.model.cache import GenerationCache, KeyValueCache, caching
from minipar.model.mask import Mask, TokenRun
from tests.model.texts import ROUTED_TOGETHER, configs, draw_tokens, loud_model
from tests.strategies import assert_equal_to, seeds, splits


@torch.no_grad()
def check_reading_in_pieces(config: ModelConfig, pieces: list[int], seed: int, batch: int = 2) -> None:
    model, tokens = loud_model(config, seed), draw_tokens(seed, batch, sum(pieces))
    with caching(model, max_tokens=sum(pieces)) as cache:
        read = torch.cat([model(tokens[:, cache.length :][:, :n]) for n in pieces if n], dim=1)
        assert cache.length == sum(pieces)
    assert_equal_to(read, model(tokens), rtol=1e-9)


@given(config=configs(), data=st.data(), seed=seeds, batch=st.integers(1, 3))
def test_a_text_read_in_pieces_gives_the_logits_of_the_whole(config, data, seed, batch):
    pieces = data.draw(splits(data.draw(st.integers(1, 12)), 4))
    check_reading_in_pieces(config, pieces, seed, batch)


def aligned_at_the_start(num_queries, num_keys, causal, positions=None):
    return Mask((TokenRun(0, num_queries),), (TokenRun(0, num_keys),), causal, positions)


def torch_causal(q, k, v, causal=True, positions=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def forgets_the_last(self, k, v, extend=KeyValueCache.extend):
    self.length = max(0, self.length - 1)
    return extend(self, k, v)


FAULTS = {
    "the mask is not aligned, plain": ("plain", attention, "single_process_mask", aligned_at_the_start),
    "the mask is not aligned, flash": ("flash", flash, "single_process_mask", aligned_at_the_start),
    "the mask is the kernel's": ("fused", attention, "CORES", {"fused": torch_causal}),
    "positions do not advance": (
        "fused",
        GenerationCache,
        "positions",
        lambda self, n, device: torch.arange(n),
    ),
    "a token is overwritten": ("fused", KeyValueCache, "extend", forgets_the_last),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_cache_with_a_fault_is_seen(monkeypatch, name):
    core, *fault = FAULTS[name]
    sizes = dict(vocab_size=13, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=12)
    config = ModelConfig(**sizes, attention=core)
    check_reading_in_pieces(config, [5, 1, 2, 1], seed=3)
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError):
        check_reading_in_pieces(config, [5, 1, 2, 1], seed=3)


@given(config=configs(), prompt=st.integers(1, 15), num_tokens=st.integers(1, 8))
def test_a_cache_reads_tokens_once_then_each_new_window_anew(config, prompt, num_tokens):
    model, tokens, lengths = loud_model(config), draw_tokens(0, 1, prompt + num_tokens), []
    with torch.no_grad(), caching(model, max_tokens=prompt + num_tokens) as cache:
        for length in range(prompt, prompt + num_tokens):
            unread = cache.unread(tokens[:, :length])
            lengths.append(unread.shape[1])
            model(unread)
    fits = range(prompt, min(12, prompt + num_tokens - 1) + 1)
    slid = prompt + num_tokens - max(prompt, 13)
    assert lengths == [prompt, *[1] * (len(fits) - 1)][: len(fits)] + [12] * max(0, slid)


@pytest.mark.parametrize("options", ROUTED_TOGETHER)
def test_where_experts_fill_up_everything_is_read_anew(options):
    model = loud_model(ModelConfig(vocab_size=13, dim=16, num_layers=2, num_heads=2, **options))
    with caching(model, max_tokens=8) as cache, torch.no_grad():
        for length in (5, 6, 7):
            unread = cache.unread(draw_tokens(0, 1, length))
            assert unread.shape == (1, length)
            model(unread)


@given(seed=seeds, group=st.sampled_from([1, 2]), max_tokens=st.integers(5, 9))
def test_what_is_kept_is_two_vectors_a_token_and_key_value_head(seed, group, max_tokens):
    config = ModelConfig(
        vocab_size=13, dim=16, num_layers=2, num_heads=4, num_kv_heads=4 // group, max_seq_len=8
    )
    model = loud_model(config, seed)
    with caching(model, max_tokens) as cache, torch.no_grad():
        model(draw_tokens(seed, 3, 5))
        kept = [x.numel() for layer in cache.key_values for x in layer._memory]
    assert sum(kept) == 2 * 2 * 3 * config.num_kv_heads * config.head_dim * min(max_tokens, 8)


def test_afterwards_the_model_is_as_it_was_even_after_an_error():
    model = loud_model(ModelConfig(vocab_size=13, dim=16, num_layers=2, num_heads=2, max_seq_len=8))
    want, before = model(draw_tokens(0, 1, 5)), {id(m): sorted(vars(m)) for m in model.modules()}
    with pytest.raises(ValueError, match="9 tokens a sample exceed"), caching(model, max_tokens=9):
        model(draw_tokens(0, 1, 9))
    assert {id(m): sorted(vars(m)) for m in model.modules()} == before
    assert torch.equal(model(draw_tokens(0, 1, 5)), want)


def test_a_latent_attention_works_on_heads_again_after_caching():
    model = Transformer(ModelConfig(dim=8, num_layers=1, num_heads=2, kv_latent_dim=4, rope_dim=2))
    with caching(model, max_tokens=4):
        pass
    (block,) = model.layers.values()
    assert not block.attention.overrides.absorbed


def test_a_model_that_is_already_writing_or_reads_parts_is_refused():
    model = loud_model(ModelConfig(vocab_size=13, dim=16, num_layers=1, num_heads=2))
    with (
        caching(model, 5),
        pytest.raises(ValueError, match="default_positions has been replaced"),
        caching(model, 5),
    ):
        pass
