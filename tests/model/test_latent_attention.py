"""Latent attention against its formulas written out, its two forms against each other, and what it caches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import LatentAttention, generate, latent_attention, rotate, rotation
from minipar.model.cache import caching
from tests.model.texts import loud_model
from tests.strategies import assert_equal_to, seeds


@st.composite
def modules(draw) -> LatentAttention:
    """A module with weights of standard deviation 1, so that scores differ much."""
    num_heads = draw(st.sampled_from([1, 2, 3]))
    config = ModelConfig(
        dim=num_heads * draw(st.sampled_from([2, 4])),
        num_heads=num_heads,
        kv_latent_dim=draw(st.integers(1, 9)),
        rope_dim=draw(st.sampled_from([2, 4])),
        attention=draw(st.sampled_from(["plain", "fused", "flash"])),
        documents=draw(st.booleans()),
    )
    module, generator = (
        LatentAttention(config, dtype=torch.float64),
        torch.Generator().manual_seed(draw(seeds)),
    )
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def inputs(module, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, length, module.q.in_features, dtype=torch.float64)
    positions = torch.arange(length)
    return x, positions % 4 if module.documents else positions


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """The rotation by complex numbers: feature i and feature i + r/2 are one number."""
    half = len(x) // 2
    angles = position.float() * (1.0 / theta ** (torch.arange(0, len(x), 2, dtype=torch.float32) / len(x)))
    y = torch.complex(x[:half], x[half:]) * torch.complex(angles.cos().double(), angles.sin().double())
    return torch.cat((y.real, y.imag))


def by_definition(module, x, positions):
    """Equations 37 to 47 of the paper's appendix C without the queries' compression: a token and a head at a time."""
    d, r, H = module.head_dim, module.rope_dim, module.num_heads
    w = {name: parameter.detach() for name, parameter in module.named_parameters()}
    y = torch.zeros_like(x)
    for b in range(len(x)):
        keys, values = [], []  # of each token, of each head
        for t, token in enumerate(x[b]):
            c = w["kv_down.weight"] @ token
            c = w["kv_norm.weight"] * c / torch.sqrt((c * c).mean() + module.kv_norm.eps)
            k_rope = turned(w["k_rope.weight"] @ token, positions[t], module.rope_theta)
            k, v = w["k_up.weight"] @ c, w["v_up.weight"] @ c
            keys.append([torch.cat((k[h * d : (h + 1) * d], k_rope)) for h in range(H)])
            values.append([v[h * d : (h + 1) * d] for h in range(H)])
            q, heads = (w["q.weight"] @ token).view(H, d + r), []
            begin = t - int(positions[t])  # of the token's document
            for h in range(H):
                query = torch.cat((q[h, :d], turned(q[h, d:], positions[t], module.rope_theta)))
                scores = torch.stack([query @ keys[s][h] for s in range(begin, t + 1)]) / math.sqrt(d + r)
                weights = torch.exp(scores - scores.max())
                heads.append(sum(a * values[begin + s][h] for s, a in enumerate(weights)) / weights.sum())
            y[b, t] = w["o.weight"] @ torch.cat(heads)
    return y


def compare_with_definition(module, batch: int, length: int, absorbed: bool) -> None:
    x, positions = inputs(module, batch, length)
    module.overrides.absorbed = absorbed
    assert_equal_to(module(x, positions), by_definition(module, x, positions))


@pytest.mark.parametrize("absorbed", [False, True])
@given(modules(), st.integers(1, 2), st.integers(1, 7))
def test_both_forms_are_the_papers_formulas(absorbed, module, batch, length):
    compare_with_definition(module, batch, length, absorbed)


def compare_forms(module, batch: int, length: int) -> None:
    x, positions = inputs(module, batch, length)
    plain = module(x, positions)
    module.overrides.absorbed = True
    absorbed = module(x, positions)
    assert_equal_to(absorbed, plain, rtol=1e-12)


@given(modules(), st.integers(1, 3), st.integers(1, 12))
def test_the_absorbed_form_is_the_plain_form_to_1e_12(module, batch, length):
    compare_forms(module, batch, length)


SMALL = ModelConfig(
    dim=16, num_layers=2, num_heads=4, kv_latent_dim=6, rope_dim=4, max_seq_len=32, vocab_size=13
)


def small_module() -> LatentAttention:
    torch.manual_seed(0)
    module = LatentAttention(SMALL, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data.normal_()
    return module


def rotated_latent(self, q, q_rope, latent, k_rope, of_documents, whole=LatentAttention._plain):
    cos, sin = rotation(torch.arange(latent.shape[1]), SMALL.kv_latent_dim, SMALL.rope_theta, latent.dtype)
    return whole(self, q, q_rope, rotate(latent.unsqueeze(-2), cos, sin).squeeze(-2), k_rope, of_documents)


def latents_without_norm(self, x, whole=LatentAttention.latents):
    if not self.overrides.absorbed:
        return whole(self, x)
    return torch.cat((self.kv_down(x), self.k_rope(x)), dim=-1)


class ScaleLeftOut:
    @staticmethod
    def sqrt(x):
        return 1.0


FAULTS = {
    "the latent is rotated": (LatentAttention, "_plain", rotated_latent),
    "the absorbed path has no norm": (LatentAttention, "latents", latents_without_norm),
    "scores are divided by the latent's width": (latent_attention, "math", ScaleLeftOut),
    "the key is not rotated": (
        latent_attention,
        "rotate",
        lambda x, cos, sin: rotate(x, cos, sin * (x.shape[2] > 1)),
    ),
}


def compare_small() -> None:
    compare_with_definition(small_module(), 2, 6, absorbed=False)
    compare_forms(small_module(), 2, 6)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match=r"max\|a - b\|"):
        compare_small()


def test_without_a_fault_the_small_module_is_right():
    compare_small()


def test_generation_caches_the_latent_and_the_rotary_key_alone():
    model, held = loud_model(SMALL), []
    with caching(model, 10) as cache:
        model(torch.zeros(3, 5, dtype=torch.int64))
        held = [sum(x.numel() for x in layer._memory) for layer in cache.key_values]
    assert held == [3 * 10 * (6 + 4)] * 2
    assert SMALL.cache_elems == 6 + 4
    assert not any(block.attention.overrides.absorbed for block in model.layers.values())
    text = generate(model, [1, 2, 3], 8)
    for end in range(3, 11):
        assert int(model(text[None, :end])[0, -1].argmax()) == text[end]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(kv_latent_dim=-1), "kv_latent_dim=-1 is negative; use 0"),
        (dict(rope_dim=2), "rope_dim=2 is for kv_latent_dim above 0; leave it out"),
        (dict(kv_latent_dim=8, rope_dim=3), "rope_dim=3: rotary embeddings turn pairs"),
        (dict(kv_latent_dim=8, rope_dim=0), "rope_dim=0: rotary embeddings turn pairs"),
        (
            dict(kv_latent_dim=8, num_kv_heads=2),
            "num_kv_heads=2 with kv_latent_dim=8: every head has its own",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig(dim=16, num_heads=4, **sizes)


def test_the_rotary_width_is_half_a_head_made_even():
    assert [ModelConfig(dim=4 * d, num_heads=4, kv_latent_dim=8).rope_dim for d in (2, 4, 6, 128)] == [
        2,
        2,
        4,
        64,
    ]
