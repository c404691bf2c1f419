"""Rounded weights: half a step, the bytes of the formula, and one text in every batch and on every mesh."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.utils.parametrize import ParametrizationList

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, Options, quantized_weights
from minipar.inference.quantized_weights import (
    check_quantized_weights,
    dequantize_weight,
    matrices,
    quantize_weight,
    quantize_weights,
    unpacked,
    weight_element_bits,
)
from minipar.mesh import placement_of
from minipar.model import Transformer
from tests.examples import examples
from tests.inference.meshes import cut
from tests.inference.test_engine import LONGEST, options, plant, serve_and_compare
from tests.inference.texts import drawn, requests
from tests.inference.trained import divergence, held_out_logits, held_out_loss, trained_model
from tests.model.texts import ROUTED_ALONE, configs, loud_model
from tests.strategies import seeds

DENSE = ModelConfig(vocab_size=16, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32)
ROUTED = replace(DENSE, num_experts=2, moe_every=1, top_k=1, capacity_factor=None, shared_dim=8)


def require_half_a_step(w, back, scales, group):
    off = (back - w).abs().unflatten(-1, (-1, group))
    assert (off <= scales.double()[..., None] / 2 * (1 + 1e-12)).all()


@given(
    seed=seeds, bits=st.sampled_from([8, 4]), group=st.sampled_from([2, 8, 16]),
    size=st.sampled_from([0.0, 1e-30, 1.0, 1e5]),
)  # fmt: skip
def test_no_weight_is_off_by_more_than_half_a_step(seed, bits, group, size):
    w = size * drawn(seed, 2, 3, 16)
    codes, scales = quantize_weight(w, bits, group)
    require_half_a_step(w, dequantize_weight(codes, scales, torch.float64), scales, group)
    assert codes.dtype == (torch.int8 if bits == 8 else torch.uint8)


def test_a_zero_point_would_shorten_the_step_by_a_sixth_for_its_bits():
    """The docstring's reason for none, of groups of 64 normally distributed weights."""
    w = drawn(0, 4000, 64)
    symmetric, with_zero_point = w.abs().amax(1) / 7, (w.amax(1) - w.amin(1)) / 15
    assert with_zero_point.mean() / symmetric.mean() == pytest.approx(5 / 6, abs=0.02)
    assert weight_element_bits(4, 64) == 4.25
    assert round(16 / weight_element_bits(4, 64), 1) == 3.8


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 4), (4, 8)])
def test_the_bytes_are_those_of_the_formula(bits, group):
    model = loud_model(ROUTED)
    shapes = [getattr(module, own).shape for _, module, own in matrices(model)]
    quantize_weights(model, bits, group)
    held = [b for m in model.modules() if isinstance(m, ParametrizationList) for b in m.buffers()]
    want = sum(s.numel() * weight_element_bits(bits, group or s[-1]) / 8 for s in shapes)
    assert sum(b.nbytes for b in held) == want
    stay = {name for name, p in model.layers.named_parameters() if p.dim() > 1}
    assert stay == {f"{i}.mlp.router.weight" for i in range(2)}


@given(
    config=configs(experts=({}, ROUTED_ALONE), max_seq_len=LONGEST),
    several=st.lists(requests(LONGEST), min_size=1, max_size=5),
    options=options(),
    how=st.sampled_from([(8, 64), (4, 8), (4, 4)]),
)
@examples(30)
def test_rounded_weights_write_one_text_in_every_batch(config, several, options, how):
    assume(how[0] == 8 or not config.kv_latent_dim)  # the drawn latents are no multiple of the groups
    model = quantize_weights(loud_model(config), *how)
    serve_and_compare(model, several, replace(options, weight_bits=how[0], weight_group=how[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_weights_are_those_of_every_dtype(dtype):
    model = Transformer(DENSE, dtype=dtype)
    whole = {name: getattr(module, own).double() for name, module, own in matrices(model)}
    quantize_weights(model, 4, 8)
    for name, module, own in matrices(model):
        assert getattr(module, own).dtype == dtype
        codes = dequantize_weight(*quantize_weight(whole[name], 4, 8), torch.float64)
        assert torch.equal(getattr(module, own), codes.to(dtype))


def codes_of(model):
    found = {}
    for name, module, own in matrices(model):
        codes, scales = module.parametrizations[own].buffers()
        found[name] = unpacked(codes), scales
    return found


def rounded_on(world, config, sizes, how, fault):
    mesh, stage = cut(world, loud_model(config), sizes)
    placements = {name: placement_of(getattr(module, own)) for name, module, own in matrices(stage)}
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            plant(patch, quantized_weights, *FAULTS_OF_SHARDS[fault])
        Engine(stage, Options(num_blocks=8, weight_bits=how[0], weight_group=how[1]), mesh)
    return placements, codes_of(stage)


def require_parts(config, how, sizes, fault=None):
    """Hold every rank's codes and scales against those of the whole model."""
    want = codes_of(quantize_weights(loud_model(config), how[0], min(how[1], config.dim)))
    world_size = sizes["tp"] * sizes["pp"]
    for placements, found in minipar.run(rounded_on, config, sizes, how, fault, world_size=world_size):
        assert any(p.length[-1] < p.global_shape[-1] for p in placements.values())
        for name, (codes, scales) in found.items():
            placement, (whole, whole_scales) = placements[name], want[name]
            assert torch.equal(codes, placement.slice_of(whole))
            of_whole = whole_scales.repeat_interleave(whole.shape[-1] // whole_scales.shape[-1], -1)
            own = scales.repeat_interleave(codes.shape[-1] // scales.shape[-1], -1)
            assert torch.equal(own, placement.slice_of(of_whole))


@pytest.mark.parametrize("config", [DENSE, ROUTED], ids=["dense", "experts"])
@pytest.mark.parametrize("how", [(8, 64), (4, 4)], ids=["8 bits", "4 bits"])
def test_a_shard_has_its_part_of_the_whole_models_codes(config, how):
    require_parts(config, how, dict(tp=2, pp=2))


FAULTS_OF_SHARDS = {
    "each rank's own largest of a row": ("_group_of", "tp if own < whole else None", "None"),
    "a group cut across tp": (
        "_group_of", "_require_whole_groups(name, group, whole, own)", "group = own if own % group else group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS_OF_SHARDS)
def test_a_planted_fault_is_seen_in_the_shards(fault):
    how = (4, 16) if "group" in fault else (8, 64)
    with pytest.raises(AssertionError):
        require_parts(DENSE, how, dict(tp=2, pp=1), fault)


def crosses(world, sizes):
    mesh, stage = cut(world, loud_model(DENSE), sizes)
    with pytest.raises(ValueError) as refused:
        quantize_weights(stage, 4, 16, mesh.comm("tp"))
    return str(refused.value)


def test_a_group_that_crosses_the_cut_is_refused():
    says = (
        "weight_group=16: a group of layers.0.attention.o crosses the cut over tp, 8 of 16 inputs a rank; "
        "use 2, 4 or 8"
    )
    assert minipar.run(crosses, dict(tp=2, pp=1), world_size=2) == [says] * 2
    with pytest.raises(ValueError, match=says):
        check_quantized_weights(DENSE, 4, 16, tp=2)
    check_quantized_weights(DENSE, 4, 8, tp=2)
    check_quantized_weights(DENSE, 8, 16, tp=2)  # a scale a row, whatever the group
    with pytest.raises(
        ValueError, match=r"weight_group=64 does not cut the 16 inputs of layers\.0\.attention\.q"
    ):
        check_quantized_weights(DENSE, 4, 64)
    with pytest.raises(ValueError, match="weight_bits=5; use 8 or 4"):
        check_quantized_weights(DENSE, 5, 64)


def test_a_model_is_rounded_once():
    model = loud_model(DENSE)
    first = quantize_weights(model, 4, 8)
    codes = copy.deepcopy(codes_of(first))
    quantize_weights(model, 4, 8)
    assert all(torch.equal(a, b) for n in codes for a, b in zip(codes[n], codes_of(model)[n]))
    with pytest.raises(
        ValueError, match="weight_bits=8: the weights are rounded already; load the model anew"
    ):
        quantize_weights(model, 8)


@pytest.mark.thorough
def test_eight_bits_cost_less_than_four():
    """By the divergence from the whole model; the loss itself moves by less than a 200th, up or down."""
    whole = trained_model()
    off, losses = {}, [held_out_loss(whole)]
    for how in ((8, 64), (4, 32), (4, 64)):
        model = quantize_weights(copy.deepcopy(whole), *how)
        off[how] = divergence(held_out_logits(whole), held_out_logits(model))
        losses.append(held_out_loss(model))
    assert 0 < 20 * off[8, 64] < off[4, 32] < off[4, 64]
    assert max(losses) < 1.005 * min(losses)


FAULTS = {
    "scale of the neighbouring row": (
        "dequantize_weight",
        "scales.to(dtype)",
        "scales.roll(1, -2).to(dtype)",
    ),
    "the first in the higher bits": ("unpacked", "(codes & 15, codes >> 4)", "(codes >> 4, codes & 15)"),
    "rounded down": ("quantize_weight", "steps.round()", "steps.floor()"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_in_the_weights(monkeypatch, fault):
    plant(monkeypatch, quantized_weights, *FAULTS[fault])
    w = drawn(1, 3, 16) * torch.tensor([[1.0], [8.0], [64.0]], dtype=torch.float64)
    codes, scales = quantized_weights.quantize_weight(w, 4, 4)
    back = quantized_weights.dequantize_weight(codes, scales, torch.float64)
    with pytest.raises(AssertionError):
        require_half_a_step(w, back, scales, 4)
