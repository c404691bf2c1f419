import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import Attention, flash_attention, fused_attention, plain_attention
from tests.model.strategies import draw_qkv, sizes
from tests.strategies import assert_equal_to, seeds


def by_definition(q, k, v, causal):
    """One query at a time, in plain loops."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = t + 1 if causal else k.shape[2]
                keys, values = k[b, h // group, :seen], v[b, h // group, :seen]
                weights = torch.exp(keys @ q[b, h, t] / math.sqrt(q.shape[-1]))
                out[b, h, t] = (weights / weights.sum()) @ values
    return out


@given(seed=seeds, sizes=sizes, causal=st.booleans())
def test_plain_attention_is_the_definition(seed, sizes, causal):
    B, (H, group), T, d = sizes
    q, k, v = (x.detach() for x in draw_qkv(seed, B, H, group, T, d))
    assert_equal_to(plain_attention(q, k, v, causal), by_definition(q, k, v, causal))


@given(seed=seeds, sizes=sizes, causal=st.booleans())
def test_fused_attention_equals_plain_attention_forward_and_backward(seed, sizes, causal):
    B, (H, group), T, d = sizes
    q, k, v = draw_qkv(seed, B, H, group, T, d)
    plain, fused = (core(q, k, v, causal) for core in (plain_attention, fused_attention))
    assert_equal_to(fused, plain)
    dy = torch.randn(plain.shape, dtype=plain.dtype)
    for a, b in zip(torch.autograd.grad(fused, (q, k, v), dy), torch.autograd.grad(plain, (q, k, v), dy)):
        assert_equal_to(a, b, rtol=1e-10, floor=1e-13)


@given(seed=seeds, sizes=sizes, data=st.data(), documents=st.booleans())
@pytest.mark.parametrize("core", [plain_attention, fused_attention, flash_attention])
def test_fewer_queries_than_keys_are_the_last_of_the_sequence(core, seed, sizes, data, documents):
    B, (H, group), S, d = sizes
    T, (q, k, v) = data.draw(st.integers(1, S)), draw_qkv(seed, B, H, group, S, d)
    positions = torch.arange(S) % 4 if documents else None
    whole = core(q, k, v, positions=positions)[:, :, S - T :]
    last = core(q[:, :, S - T :], k, v, positions=None if positions is None else positions[S - T :])
    assert_equal_to(last, whole)
    dy = torch.randn(whole.shape, dtype=whole.dtype)
    for a, b in zip(torch.autograd.grad(last, (q, k, v), dy), torch.autograd.grad(whole, (q, k, v), dy)):
        assert_equal_to(a, b, floor=1e-13)


@pytest.mark.parametrize("core", [plain_attention, fused_attention])
def test_bf16_stays_near_float32(core):
    q, k, v = draw_qkv(0, 2, 4, 2, 33, 8, torch.bfloat16)
    exact = plain_attention(q.float(), k.float(), v.float())
    assert core(q, k, v).dtype == torch.bfloat16
    assert (core(q, k, v).float() - exact).abs().max() < 0.03


def test_no_token_reads_a_later_one():
    module = Attention(ModelConfig(dim=16, num_heads=4, num_kv_heads=2), dtype=torch.float64)
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = module(x, torch.arange(6)), module(changed, torch.arange(6))
    assert_equal_to(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:])


def test_a_part_of_the_heads_is_a_smaller_attention():
    """What tensor parallelism relies on: cut q, k, v by rows and o by columns, and the parts' outputs sum to the whole."""
    torch.manual_seed(0)
    config = ModelConfig(dim=16, num_heads=4, num_kv_heads=2)
    whole, x = Attention(config, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    for p in whole.parameters():
        torch.nn.init.normal_(p)
    total = 0
    for part in range(2):
        half = Attention(config, dtype=torch.float64)
        half.num_heads, half.num_kv_heads = 2, 1
        for name, rows in (("q", 8), ("k", 4), ("v", 4)):
            weight = getattr(whole, name).weight[part * rows : (part + 1) * rows]
            getattr(half, name).weight = torch.nn.Parameter(weight)
        half.o.weight = torch.nn.Parameter(whole.o.weight[:, part * 8 : (part + 1) * 8])
        total = total + half(x, torch.arange(5))
    assert_equal_to(total, whole(x, torch.arange(5)))


def test_the_core_may_be_replaced():
    module = Attention(ModelConfig(dim=16, num_heads=4, num_kv_heads=2))
    seen = []

    def core(q, k, v, causal=True):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), causal))
        return q

    module.overrides.core = core
    module(torch.randn(2, 5, 16), torch.arange(5))
    assert seen == [((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4), True)]


@pytest.mark.parametrize("core", [plain_attention, fused_attention, flash_attention])
def test_documents_without_a_causal_mask_are_refused(core):
    """Positions do not say where a document ends: every core refuses, and none sees other documents instead."""
    with pytest.raises(
        ValueError, match="positions of documents are given with causal=False; use causal=True"
    ):
        core(*draw_qkv(0, 1, 2, 1, 4, 2), causal=False, positions=torch.tensor([0, 1, 0, 1]))
