"""Rounded keys and values: half a step, the bytes of the formula, and a text that depends on the request alone."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.inference import Engine, Options, Request, Result, quantized_blocks
from minipar.inference.blocks import BlockMemory, BlockPool
from minipar.inference.events import Kind
from minipar.inference.quantized_blocks import (
    BITS,
    QuantizedBlockMemory,
    element_bits,
    restore_keys,
    restore_values,
    round_keys,
    round_values,
)
from minipar.inference.scheduler import Scheduler
from minipar.model import Transformer
from minipar.model.attention import Attention, plain_attention
from tests.examples import examples
from tests.inference.test_engine import LONGEST, SMALL, crowd, options, plant
from tests.inference.texts import PROMPTS, drawn, requests, texts_alone, tokens_of
from tests.inference.trained import divergence, held_out_logits, trained_model
from tests.model.texts import ROUTED_ALONE, configs, loud_model
from tests.strategies import seeds

CPU = torch.device("cpu")


def rounded_by_definition(x, dim, bits, group):
    """x with each group along `dim` rounded; the last ones, which fill no group, as they are."""
    x = x.movedim(dim, -1)
    full = x.shape[-1] // group * group
    groups = x[..., :full].unflatten(-1, (-1, group))
    least = groups.amin(-1, keepdim=True)
    step = ((groups.amax(-1, keepdim=True) - least) / (2**bits - 1)).half().double()
    least = least.half().double()
    codes = torch.where(step == 0, 0.0, ((groups.double() - least) / step)).round().clamp(0, 2**bits - 1)
    return torch.cat(((least + step * codes).flatten(-2).to(x.dtype), x[..., full:]), -1).movedim(-1, dim)


class ByDefinition:
    """Attention over a whole text, token by token as quantized_blocks.py says: k and v [1, h_kv, T, d]."""

    def __init__(self, bits, block_size, group, keys="by channel", whole_block=True):
        self.bits, self.b, self.group, self.keys, self.whole_block = (
            bits, block_size, group, keys, whole_block,
        )  # fmt: skip

    def __call__(self, q, k, v, causal=True, positions=None):
        rounded_v = rounded_by_definition(v, 3, self.bits, self.group)
        along, group = (2, self.b) if self.keys == "by channel" else (3, self.group)
        rounded_k = rounded_by_definition(k, along, self.bits, group)
        outs = []
        for begin in range(0, q.shape[2], self.b):
            end, first = min(q.shape[2], begin + self.b), begin if self.whole_block else q.shape[2]
            seen = [
                torch.cat((rounded[:, :, :first], x[:, :, first:]), 2)[:, :, :end]
                for rounded, x in ((rounded_k, k), (rounded_v, v))
            ]
            outs.append(plain_attention(q[:, :, begin:end], *seen))
        return torch.cat(outs, 2)


@contextmanager
def attending(model, core):
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    for attention in attentions:
        attention.overrides.core = core
    try:
        yield model
    finally:
        for attention in attentions:
            attention.overrides.core = None


def serve_and_compare_rounded(model, several, options) -> Engine:
    group = min(options.cache_group, model.config.head_dim)
    with attending(model, ByDefinition(options.cache_bits, options.block_size, group)):
        want = texts_alone(model, several)
    engine = Engine(model, options)
    results = [Result() for _ in several]
    for _ in engine.iterate(several, results):
        require_one_whole_block(engine)
    assert tokens_of(results) == want
    return engine


def require_one_whole_block(engine):
    """After a step, at most the last block of a request is whole."""
    for memory in engine.paged.memories:
        held = {block for s in engine.scheduler.sequences for block in s.table} & set(memory.whole)
        assert held <= {s.table[-1] for s in engine.scheduler.sequences if s.table}


@given(
    config=configs(experts=({}, ROUTED_ALONE), max_seq_len=LONGEST).filter(lambda c: not c.kv_latent_dim),
    several=st.lists(requests(LONGEST), min_size=1, max_size=6),
    options=options(),
    bits=st.sampled_from(BITS),
)
@examples(40)
def test_each_request_gets_the_text_it_gets_alone_rounded(config, several, options, bits):
    model = loud_model(replace(config, num_heads=2, num_kv_heads=2, documents=False))
    serve_and_compare_rounded(model, several, replace(options, cache_bits=bits, cache_group=4))


@pytest.mark.thorough
@given(options=options(), bits=st.sampled_from(BITS), weight_bits=st.sampled_from([None, 8, 4]))
@examples(5)
def test_one_by_one_rounded_texts_are_the_same_in_float32(options, bits, weight_bits):
    model, several = Transformer(SMALL, dtype=torch.float32), crowd()[0]
    rounding = dict(cache_bits=bits, cache_group=4, weight_bits=weight_bits, weight_group=8, one_by_one=True)
    together = Engine(model, replace(options, **rounding)).run(several)
    roomy = Options(block_size=options.block_size, num_blocks=40, **rounding)
    assert together == [Engine(model, roomy).run([replace(r, arrival_s=0)])[0] for r in several]


def rounded_crowd(bits, **changes):
    several, options = crowd()
    return several, replace(options, cache_bits=bits, cache_group=4, **changes)


def rounded_crowds(bits=2):
    for preemption in ("recompute", "swap"):
        serve_and_compare_rounded(loud_model(SMALL), *rounded_crowd(bits, preemption=preemption))


@pytest.mark.thorough
@pytest.mark.parametrize("bits", BITS)
def test_in_a_crowd_rounded_texts_are_those_of_requests_alone(bits):
    rounded_crowds(bits)


def test_rounding_changes_texts():
    several, options = rounded_crowd(2)
    model = loud_model(SMALL)
    assert Engine(model, options).run(several) != Engine(model, replace(options, cache_bits=None)).run(
        several
    )


@given(
    seed=seeds, bits=st.sampled_from(BITS), size=st.sampled_from([0.0, 1.0, 50.0]),
    group=st.sampled_from([4, 8, 16]), block=st.integers(1, 5),
)  # fmt: skip
def test_no_element_is_off_by_more_than_half_a_step(seed, bits, group, size, block):
    x = size * drawn(seed, 3, block, 2, 16) + 1
    values = restore_values(*round_values(x, bits, group), bits, torch.float64)
    require_half_a_step(x.unflatten(-1, (-1, group)), values.unflatten(-1, (-1, group)), bits)
    keys = restore_keys(*round_keys(x, bits), bits, torch.float64)
    require_half_a_step(x.movedim(1, -1), keys.movedim(1, -1), bits)


def require_half_a_step(x, back, bits):
    step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    rounding = x.abs().amax(-1) * 2**-10 * 2  # of min and step, to 16 bits
    assert ((back - x).abs().amax(-1) <= step / 2 + rounding).all()


@pytest.mark.parametrize("bits", BITS)
def test_its_bytes_are_those_of_the_formula(bits):
    pool = BlockPool(5, 32)
    whole = BlockMemory(pool, 2, 128, torch.bfloat16, CPU)
    rounded = QuantizedBlockMemory(pool, 2, 128, torch.bfloat16, CPU, bits=bits, group=64)
    num_elements = 5 * 32 * 2 * 128  # of keys, and as many of values
    assert rounded.nbytes * 8 == num_elements * (element_bits(bits, 32) + element_bits(bits, 64))
    assert whole.nbytes * 8 == num_elements * 32
    rounded.write(torch.arange(40), *torch.zeros(2, 40, 2, 128, dtype=torch.bfloat16))
    assert (
        sum(x.nbytes for x in rounded.whole.values()) == 2 * 2 * 32 * 2 * 128 * 2
    )  # two blocks, until one is settled


@given(seed=seeds, bits=st.sampled_from(BITS), b=st.integers(1, 3))
def test_a_read_sees_its_own_block_whole_and_the_others_rounded(seed, bits, b):
    pool = BlockPool(8, b)
    memory = QuantizedBlockMemory(pool, 2, 8, torch.float64, CPU, bits=bits, group=4)
    k, v = drawn(seed, 2, 5, 2, 8)
    table = [pool.allocate() for _ in range(5)]
    memory.write(torch.tensor([table[t // b] * b + t % b for t in range(5)]), k, v)
    for settled in (0, 3, 4):
        memory.settle(table, settled)
        keys, values = memory.read(torch.tensor(table), 5)
        for got, x, dim, group in ((keys, k, 0, b), (values, v, 2, 4)):
            first = 4 // b * b
            want = torch.cat((rounded_by_definition(x[:first], dim, bits, group), x[first:]))
            assert torch.equal(got[0].transpose(0, 1), want)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [4, 2])
def test_a_whole_block_and_keys_by_channel_lose_least(bits):
    """On 32 samples of 64 tokens, in blocks of 16: the divergence from the distribution of whole keys and values."""
    model = trained_model()
    whole, off = held_out_logits(model), {}
    for manner in (("by token", False), ("by token", True), ("by channel", True)):
        with attending(model, ByDefinition(bits, 16, 32, *manner)):
            off[manner] = divergence(whole, held_out_logits(model))
    assert off["by token", False] > 6 * off["by token", True]
    assert off["by token", True] > 1.4 * off["by channel", True]


FAULTS = {
    "recent tokens rounded": (
        QuantizedBlockMemory, "views", "own = self.whole[blocks[i]][:, : stop - i * b]",
        "self._round(blocks[i]); own = self._restore(table[i : i + 1])[:, : stop - i * b]",
    ),
    "rounded with a wrong guess": (
        Engine, "_write", "sequence.table, sequence.num_read)", "sequence.table, sequence.num_read + len(read.guesses))",
    ),
    "whole tokens not copied on swapping": (
        QuantizedBlockMemory, "save", "[*super().save(table), torch.tensor(places), *whole]",
        "[*BlockMemory.save(self, table), torch.tensor([])]",
    ),
    "a cached block read on from its middle": (Scheduler, "_admit", "sequence.text[:-1]", "sequence.text"),
    "extents of the neighbouring channel": (
        quantized_blocks, "restore_keys", "extents, -3", "extents.roll(1, -2), -3",
    ),
    "keys of the neighbouring channel": (
        quantized_blocks, "round_keys", "round_along(k, -3", "round_along(k.roll(1, -1), -3",
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    plant(monkeypatch, *FAULTS[fault])
    with pytest.raises(AssertionError):
        rounded_crowds()


def test_a_block_given_back_keeps_no_unquantized_copy():
    plain = Options(block_size=4, num_blocks=40, prefix_cache=False, cache_bits=8)
    engine = Engine(loud_model(SMALL), plain)
    several = [Request(PROMPTS[0][:5], 2), Request(PROMPTS[1][:5], 2), Request(PROMPTS[2][:5], 9)]
    for _ in engine.iterate(several, [Result() for _ in several]):
        held = {block for sequence in engine.scheduler.sequences for block in sequence.table}
        just_ended = [e for e in engine.events if e.kind == Kind.FINISH and e.end_s == engine.now_s]
        for memory in engine.paged.memories:
            assert len(memory.whole.keys() - held) <= len(just_ended)
