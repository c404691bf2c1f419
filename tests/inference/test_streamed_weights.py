"""Weights read layer by layer: the same text, at most two layers in memory, every byte once a pass."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.data_parallel.memory import Memory
from minipar.inference import Engine, Options, engine, streamed_weights
from minipar.inference.quantized_weights import quantize_weights, weight_element_bits
from minipar.inference.streamed_weights import StreamedWeights, stream_weights
from tests.examples import examples
from tests.inference.test_engine import LONGEST, crowd, plant
from tests.model.texts import ROUTED_ALONE, configs, draw_tokens, loud_model

pytest.importorskip("minipar.extras.offload.memories")
CONFIG = ModelConfig(vocab_size=16, dim=16, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=32)


@given(
    config=configs(experts=({}, ROUTED_ALONE), max_seq_len=LONGEST),
    where=st.sampled_from(["cpu", "disk"]),
    weight_bits=st.sampled_from([None, 8]),
)
@examples(10)
def test_streamed_layers_write_the_same_text(config, where, weight_bits):
    several, options = crowd()
    options = replace(options, weight_bits=weight_bits)
    want = Engine(loud_model(config), options).run(several)
    model = loud_model(config)
    for _ in range(2):  # a second engine finds the layers where the first has put them
        assert Engine(model, replace(options, offload=where)).run(several) == want


@torch.no_grad()
@pytest.mark.parametrize("bits", [None, 4])
def test_two_layers_are_resident_and_a_pass_reads_each_once(bits):
    model = loud_model(
        replace(CONFIG, dim=64, hidden_dim=192)
    )  # so that every weight fills units of 64 bytes
    if bits is not None:
        quantize_weights(model, bits, 16)
    block = next(iter(model.layers.values()))
    layer_bytes = sum(x.nbytes for x in [*block.parameters(), *block.buffers()])
    stream_weights(model, "disk")
    streamed = model.overrides.run_blocks
    memory, resident, filled = streamed.memory, [], []

    def count(module, *_):
        buffers = [*memory._free, *(s.buffer for s in [*memory._staged.values(), *memory._loaded.values()])]
        resident.append(sum(buffer.nbytes for buffer in buffers))
        filled.append([sum(p.numel() for p in b.parameters()) > 0 for b in model.layers.values()])

    for block in model.layers.values():
        block.register_forward_hook(count)
    for passes in (1, 2):
        model(draw_tokens(0, 2, 5))
        assert streamed.read_bytes == passes * CONFIG.num_layers * layer_bytes
    assert set(resident) == {2 * layer_bytes}
    assert filled[:4] == filled[4:] == torch.eye(4).bool().tolist(), (
        "only the layer that computes has weights"
    )


class Late(Memory):
    """A memory from which nothing arrives before it is waited for, and nothing stays after it is released."""

    def __init__(self):
        self.buffers = {}

    def prefetch(self, offloaded, trace=None):
        (resting,) = offloaded.values()
        self.buffers.setdefault(resting.data_ptr(), torch.full_like(resting, 255))  # every float is a nan

    def load(self, offloaded, trace=None):
        self.prefetch(offloaded)
        (resting,) = offloaded.values()
        return {"layer": self.buffers[resting.data_ptr()].copy_(resting)}

    def release(self, offloaded):
        (resting,) = offloaded.values()
        self.buffers.pop(resting.data_ptr()).fill_(255)


FAULTS = {
    "used before it has arrived": (
        'layer.arrive(self.memory.load(layer.resting)["layer"])', "self.memory.load(layer.resting)",
    ),
    "not waited for": (
        'layer.arrive(self.memory.load(layer.resting)["layer"])',
        "self.memory.prefetch(layer.resting); layer.arrive(self.memory.buffers[layer.resting['layer'].data_ptr()])",
    ),
    "the layer after in its place": ("self.layers[number], ", "self.layers[number - 1], "),
    "given up too early": (
        "x = block(x, *args)",
        "self.memory.release(layer.resting); x = block(x, *args); self.memory.load(layer.resting)",
    ),
}  # fmt: skip


@torch.no_grad()
def require_same_logits():
    tokens, model = draw_tokens(0, 2, 5), loud_model(CONFIG)
    want = model(tokens)
    streamed_weights.StreamedWeights(model, Late())
    for _ in range(2):
        assert torch.equal(model(tokens), want)


def test_layers_that_arrive_late_are_waited_for():
    require_same_logits()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_while_streaming(monkeypatch, fault):
    plant(monkeypatch, StreamedWeights, "__call__", *FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError)):
        require_same_logits()


def test_reading_bounds_the_tokens_of_a_second():
    """The docstring's figures."""
    assert round(5e9 / (7e9 * 2), 2) == 0.36
    assert round(16 / weight_element_bits(4, 64), 1) == 3.8


def test_an_engine_streams_from_the_folder_that_it_is_told(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "stream_weights", lambda model, *where: asked.append(where))
    Engine(loud_model(CONFIG), Options(offload="disk", offload_folder=str(tmp_path)))
    assert asked == [("disk", str(tmp_path))]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(offload="tape"), "offload='tape' is unknown; use none, cpu or disk"),
        (dict(offload_folder="/"), "offload_folder=/ is for offload=disk, and offload=none; leave it out"),
        (dict(offload="disk", offload_folder="/no"), "offload_folder=/no is no folder to write to"),
    ],
)
def test_a_place_that_is_not_there_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Options(**wrong)
