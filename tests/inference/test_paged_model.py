"""What a paged cache cannot hold is refused by name, before any rank starts and by an engine."""

from dataclasses import replace

import pytest

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine
from minipar.inference.paged_model import require_cacheable
from minipar.model import Transformer

PLAIN = ModelConfig(vocab_size=5, dim=16, num_layers=1, num_heads=2)
LATENTS = replace(PLAIN, kv_latent_dim=6)
FILLED = replace(PLAIN, num_experts=2, capacity_factor=1.0)
USUAL = dict(block_size=4, cp=1, cache_bits=None, cache_group=4)


@pytest.mark.parametrize(
    ("config", "how", "says"),
    [
        (PLAIN, dict(cp=2, cache_bits=8), "cache_bits=8 with cp=2: a block is rounded as a whole; use cp=1"),
        (LATENTS, dict(cp=2), "cp=2: caches of latents are not spread over cp; use cp=1"),
        (PLAIN, dict(cp=2, block_size=5), "cp=2 does not divide block_size=5; use 1 or 5"),
        (PLAIN, dict(cache_bits=3), "cache_bits=3; use 8, 4 or 2"),
        (PLAIN, dict(cache_bits=4, cache_group=5), "cache_group=5 does not divide head_dim=8; use 1, 2, 4 or 8"),
        (
            PLAIN, dict(cache_bits=2, cache_group=2),
            "cache_group=2 elements of 2 bits are no whole bytes; use a multiple of 4",
        ),
        (
            LATENTS, dict(cache_bits=8),
            "cache_bits=8 with kv_latent_dim=6: keys and values are rounded, latents are not; leave cache_bits out",
        ),
        (FILLED, {}, r"capacity_factor=1\.0: experts that fill up"),
    ],
)  # fmt: skip
def test_what_cannot_be_cached_is_refused(config, how, says):
    require_cacheable(PLAIN, **{**USUAL, "cache_bits": 2})
    with pytest.raises(ValueError, match=says):
        require_cacheable(config, **{**USUAL, **how})


def test_an_engine_refuses_what_it_cannot_cache():
    with pytest.raises(ValueError, match="experts that fill up"):
        Engine(Transformer(FILLED))
