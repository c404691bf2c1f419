"""The figures of serving, against published ones, laws that any such figures obey, and bytes that are counted."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.cost.models import ModelShape
from minipar.cost.serving import (
    Bits,
    cache_elems,
    cache_token_bytes,
    decode_time,
    in_a_run,
    most_requests,
    prefill_s,
    prefill_time,
    rank_cache_token_bytes,
    rank_weight_bytes,
    rows_where_arithmetic_begins,
    stored_bytes,
    transfer_s,
)
from minipar.inference.blocks import BlockPool
from minipar.inference.paged_model import PagedModel
from minipar.model import Transformer
from tests.cost.published import GPT_FAST, NEMO_7B

LLAMA, H100 = find_model("llama-7b"), find_machine("h100")


def test_a_7b_model_on_an_h100():
    assert 1e3 * decode_time(LLAMA, H100, 1, 1).step_s == pytest.approx(4.0, abs=0.05)
    assert 1e3 * decode_time(LLAMA, H100, 16, 4096).step_s == pytest.approx(14.3, abs=0.05)
    assert most_requests(LLAMA, H100, 4096) == 30
    assert most_requests(LLAMA, H100, 4096, bits=Bits(16, 8)) == 51  # 9.25 bits for 16
    assert round(rows_where_arithmetic_begins(H100)) == 295
    assert cache_token_bytes(LLAMA) == 1 << 19  # half a mebibyte a token


def test_over_8_gpus_latency_decides():
    """The weights are read in 0.5 ms, an eighth; 64 all-reduces, of a few bytes each, wait 3.6 ms."""
    time = decode_time(LLAMA, H100, 1, 1, tp=8)
    assert 1e3 * time.reading_s == pytest.approx(0.5, abs=0.01)
    assert 1e3 * time.messages_s == pytest.approx(3.6, abs=0.02)
    assert time.step_s > decode_time(LLAMA, H100, 1, 1).step_s  # slower than one GPU


def test_ranks_beyond_the_key_value_heads_hold_copies():
    shape = replace(LLAMA, num_kv_heads=4)
    assert [rank_cache_token_bytes(shape, tp) * 4 / cache_token_bytes(shape) for tp in (1, 2, 4, 8)] == [
        4,
        2,
        1,
        1,
    ]


def test_deepseek_v2_caches_576_elements_a_token_and_layer():
    elems = cache_elems(num_heads=128, head_dim=128, num_kv_heads=8, kv_latent_dim=512, rope_dim=64)
    assert elems == {"MHA": 2 * 128 * 128, "GQA": 2 * 8 * 128, "MQA": 2 * 128, "MLA": 512 + 64}
    assert elems["MLA"] == 9 / 2 * 128  # "equal to GQA with only 2.25 groups", table 1
    assert elems["MHA"] / elems["MLA"] == pytest.approx(56.9, abs=0.05)


def test_a_latent_is_cached_and_computed_whole_on_every_rank():
    config = ModelConfig(dim=16, num_heads=4, num_layers=2, kv_latent_dim=6, rope_dim=4, tie_embeddings=True)
    shape = ModelShape.of(config)
    assert [rank_cache_token_bytes(shape, tp) for tp in (1, 2, 4)] == [2 * (6 + 4) * 2] * 3
    assert cache_token_bytes(shape) == config.num_layers * config.cache_elems * 2
    assert rank_weight_bytes(shape, 1) == 2 * shape.num_params
    whole = 2 * 16 * (6 + 4)
    assert rank_weight_bytes(shape, 4) == 2 * ((shape.num_params - whole) / 4 + whole)


batches, contexts = st.integers(1, 600), st.integers(1, 9000)


@given(batch=batches, context=contexts, tp=st.sampled_from([1, 2, 4, 8]))
def test_more_of_anything_takes_no_less_time(batch, context, tp):
    step_s = decode_time(LLAMA, H100, batch, context, tp).step_s
    assert decode_time(LLAMA, H100, batch + 1, context, tp).step_s > step_s
    assert decode_time(LLAMA, H100, batch, context + 1, tp).step_s >= step_s
    assert (
        decode_time(LLAMA, H100, 2 * batch, context, tp).step_s < 2 * step_s + 1e-12
    )  # a batch shares the weights
    assert decode_time(LLAMA, replace(H100, hbm_bytes_per_s=9e12), batch, context, tp).step_s <= step_s
    assert most_requests(LLAMA, H100, context + 1, tp) <= most_requests(LLAMA, H100, context, tp)
    fits = [most_requests(LLAMA, H100, context, tp, Bits(16, bits)) for bits in (16, 8, 4, 2)]
    assert fits == sorted(fits)  # more bits of the cache never fit more requests
    assert prefill_s(LLAMA, H100, context, tp) == pytest.approx(prefill_s(LLAMA, H100, context) / tp)


def test_weights_and_cache_are_the_bytes_that_a_model_has():
    config = ModelConfig(vocab_size=50, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, max_seq_len=64)
    model, shape = Transformer(config, dtype=torch.bfloat16), ModelShape.of(config)
    assert sum(p.nbytes for p in model.parameters()) == shape.num_params * 2
    paged = PagedModel(model, BlockPool(5, 4))
    assert sum(memory.nbytes for memory in paged.memories) == 5 * 4 * cache_token_bytes(shape)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [32, 512])
def test_a_rounded_cache_is_the_bytes_that_a_model_has(bits, dim):
    """Values share a step over 64 features or a head, keys over the 4 tokens of a block."""
    config = ModelConfig(vocab_size=50, dim=dim, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64)
    paged = PagedModel(Transformer(config), BlockPool(5, 4), cache_bits=bits)
    counted = sum(memory.nbytes for memory in paged.memories)
    assert counted == 5 * 4 * cache_token_bytes(ModelShape.of(config), bits, block_size=4)


def test_a_prompt_is_its_products_its_attention_and_large_messages():
    T, tp = 2048, 4
    time = prefill_time(LLAMA, H100, T, tp)
    attention_s = 2 * T**2 * 4096 * 32 / tp / (H100.peak_flops * H100.attention_fraction)
    assert time.arithmetic_s == pytest.approx(prefill_s(LLAMA, H100, T, tp) + attention_s)
    hops_s = H100.start_latency_s + 6 * H100.link_latency_s
    assert time.messages_s == pytest.approx(64 * (hops_s + 1.5 * T * 4096 * 2 / H100.link_bytes_per_s))
    assert (
        prefill_time(LLAMA, H100, 1).step_s == decode_time(LLAMA, H100, 1, 1).weights_s
    )  # reading them decides


def test_a_direct_all_reduce_waits_for_one_hop_and_reads_more_bytes():
    ring, direct = (decode_time(LLAMA, H100, 64, 1, 8, all_reduce=a).messages_s for a in ("ring", "direct"))
    beta = 64 * 4096 * 2 / H100.link_bytes_per_s
    assert ring == pytest.approx(64 * (H100.start_latency_s + 14 * H100.link_latency_s + 14 / 8 * beta))
    assert direct == pytest.approx(64 * (H100.start_latency_s + H100.link_latency_s + 7 * beta))
    rows = 1 << 16
    assert (
        decode_time(LLAMA, H100, rows, 1, 8, all_reduce="direct").messages_s
        > decode_time(LLAMA, H100, rows, 1, 8).messages_s
    )


def test_sending_the_cache_of_2048_tokens_takes_21_ms():
    assert 2048 * cache_token_bytes(LLAMA) == pytest.approx(1.07e9, rel=0.01)
    assert 1e3 * transfer_s(LLAMA, H100, 2048) == pytest.approx(21, abs=0.5)
    assert 1e3 * transfer_s(LLAMA, H100, 2048, tp=4) == pytest.approx(21 / 4, abs=0.2)
    assert transfer_s(find_model("llama-70b"), replace(H100, cards_per_node=16), 1, tp=16) == pytest.approx(
        cache_token_bytes(find_model("llama-70b")) / 8 / H100.card_bytes_per_s
    )  # copies of heads need not be sent


def test_published_sizes_of_caches():
    """PagedAttention, arXiv:2309.06180, section 3: 800 KB. DistServe, arXiv:2401.09670, section 3.3: 1.13 GB (of 2^30)."""
    opt_13b = ModelShape("opt-13b", 40, 5120, 40, 20480, 50272)
    opt_66b = ModelShape("opt-66b", 64, 9216, 72, 36864, 50272)
    assert cache_token_bytes(opt_13b) == 800 * 1024
    assert 512 * cache_token_bytes(opt_66b) / 2**30 == pytest.approx(1.13, abs=0.01)


def error(ours: float, published: float) -> float:
    return ours / published - 1


def gpt_fast_error(
    model: str, tp: int, bits: int, tokens_per_s: float, all_reduce: str = "ring", **changes: float
) -> float:
    machine = replace(in_a_run(find_machine("a100-80gb")), **changes)
    step_s = decode_time(find_model(model), machine, 1, 100, tp, Bits(bits), all_reduce).step_s
    return error(1 / step_s, tokens_per_s)


def test_published_decodes_in_16_bits_are_met_within_a_third():
    """Never fitted: 7B on 1, 2, 4, 8 GPUs is 13, 14, -1, -34 % too fast, 70B on 2, 4, 8 is 3, 0, -19 %.

    A ring's hops are too slow for 8 GPUs, whose all-reduce is direct there; a direct one's alone are too fast.
    """
    errors = {row[:2]: gpt_fast_error(*row) for row in GPT_FAST if row[2] == 16}
    print({row: f"{e:+.0%}" for row, e in errors.items()})
    assert max(map(abs, errors.values())) < 0.35
    assert max(abs(e) for (model, _), e in errors.items() if model == "llama-70b") < 0.2
    for row in GPT_FAST:
        if row[1] == 8:
            assert gpt_fast_error(*row) < 0 < gpt_fast_error(*row, all_reduce="direct")


def test_published_decodes_wait_longer_than_nccls_ll_protocol():
    """By LL's latencies (6.6 us to start, 0.6 a hop; src/graph/tuning.cc) 7B on 4 and 8 GPUs is 42 and 51 % too fast."""
    several = [row for row in GPT_FAST if row[1] > 1]
    simple = [gpt_fast_error(*row) for row in several]
    short = [gpt_fast_error(*row, start_latency_s=6.6e-6, link_latency_s=0.6e-6) for row in several]
    print([f"{e:+.0%}" for e in short])
    assert min(short) > 0
    assert sum(map(abs, short)) > 2 * sum(map(abs, simple))


def test_published_decodes_in_fewer_bits_are_slower_than_reading():
    """Reading codes back is left out: 8 bits are 14 and 43 % too fast here, 4 bits 63 and 112 %."""
    errors = [(row[2], gpt_fast_error(*row)) for row in GPT_FAST if row[2] < 16]
    print([f"{bits} bits {e:+.0%}" for bits, e in errors])
    assert all(0 < e < {8: 0.5, 4: 1.2}[bits] for bits, e in errors)


def test_a_published_server_of_7b_takes_up_to_twice_as_long():
    """Launches of kernels and the server are left out. With a 7B model they are 13 to 50 % of the published time."""
    errors = []
    for batch, tp, *published in NEMO_7B:
        for name, ms in zip(("a100-80gb", "h100"), published):
            machine = in_a_run(find_machine(name))
            prompts_s = prefill_time(LLAMA, machine, 128 * batch, tp).step_s
            decodes_s = 19 * decode_time(LLAMA, machine, batch, 138, tp).step_s
            errors.append(error(1e3 * (prompts_s + decodes_s), ms))
    print([f"{e:+.0%}" for e in errors])
    assert -0.51 < min(errors) < max(errors) < 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="tp=16 exceeds the 8 GPUs of a node"):
        decode_time(LLAMA, H100, 1, 1, tp=16)
    with pytest.raises(ValueError, match="tp=3 does not divide num_heads=32"):
        decode_time(LLAMA, H100, 1, 1, tp=3)
    with pytest.raises(ValueError, match="batch=0"):
        decode_time(LLAMA, H100, 0, 1)
    with pytest.raises(ValueError, match="all_reduce='tree' is unknown; use ring or direct"):
        decode_time(LLAMA, H100, 1, 1, tp=2, all_reduce="tree")
    with pytest.raises(ValueError, match="bits=3; use 16, 8, 4 or 2"):
        stored_bytes(3)
    assert most_requests(find_model("llama-70b"), H100, 1) == 0
