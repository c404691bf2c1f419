import dataclasses

import pytest

from minipar.config.model_config import ModelConfig


def test_the_default_swiglu_is_as_large_as_a_4x_wide_mlp():
    for dim in (32, 64, 96, 128, 256, 512):
        hidden = ModelConfig(dim=dim).hidden_dim
        assert hidden % 16 == 0
        assert 0 <= hidden - 8 * dim / 3 < 16


def test_unset_sizes_follow_the_others_and_survive_a_replacement():
    config = ModelConfig(num_heads=8, num_kv_heads=2, dim=64)
    assert (config.num_kv_heads, config.head_dim) == (2, 8)
    assert ModelConfig(num_heads=8, dim=64).num_kv_heads == 8
    given = ModelConfig(num_heads=3, dim=64, head_dim=20)
    assert given.head_dim == dataclasses.replace(given, dim=72).head_dim == 20
    assert dataclasses.replace(config, dim=128).head_dim == 16
    assert dataclasses.replace(config, num_layers=7) == ModelConfig(
        num_heads=8, num_kv_heads=2, dim=64, num_layers=7
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(num_heads=3), "num_heads=3 does not divide dim=128; use 1, 2, 4"),
        (dict(num_kv_heads=3), "num_kv_heads=3 does not divide num_heads=4; use 1, 2 or 4"),
        (dict(dim=12, num_heads=4), "odd head_dim=3.*use num_heads=1, 2, 3 or 6"),
        (dict(dim=7, num_heads=1), "odd head_dim=7.*use an even dim"),
        (dict(head_dim=3), "head_dim=3 is odd.*use an even head_dim"),
        (dict(head_dim=0), "head_dim=0; use a whole number of 1 or more"),
        (dict(kv_latent_dim=8, head_dim=6), "head_dim=6 with kv_latent_dim=8.*use head_dim=32"),
        (dict(kv_latent_dim=8, qkv_bias=True), "qkv_bias=True with kv_latent_dim=8.*use qkv_bias=False"),
        (dict(kv_latent_dim=8, qk_norm=True), "qk_norm=True with kv_latent_dim=8.*use qk_norm=False"),
        (dict(num_layers=0), "num_layers=0; use a whole number of 1 or more"),
        (dict(vocab_size=2.5), "vocab_size=2.5 is a float; use a whole number"),
        (dict(hidden_dim=-16), "hidden_dim=-16; use a whole number of 1 or more"),
        (dict(max_seq_len=True), "max_seq_len=True is a bool; use a whole number"),
        (dict(dropout=1.0), "dropout=1.0 is not a probability below 1"),
        (dict(dropout=float("nan")), "dropout=nan"),
        (dict(norm_eps=0.0), "norm_eps=0.0 is not positive"),
        (dict(rope_theta=-1.0), "rope_theta=-1.0 is not positive"),
        (dict(attention="fast"), "attention='fast' is unknown; use fused, plain or flash"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_what_would_work(wrong, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig(**wrong)
