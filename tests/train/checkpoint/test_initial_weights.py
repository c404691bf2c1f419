"""Weights that a rank starts from: the same as ever, never more of them than its part and one unit, or those of a Llama."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import minipar
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig, schedule_of
from minipar.mesh import Mesh, Placement, place_whole, placement_of
from minipar.model import Transformer
from minipar.model.huggingface import INDEX, LlamaWeights
from minipar.support.live_bytes import LiveBytes
from minipar.train import train
from minipar.train.checkpoint.export import export_llama
from minipar.train.checkpoint.initial_weights import (
    check_initial_weights,
    fill_buffers,
    initial_values,
    whole_model,
)
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.parallelize import own_stages, parallelize, transformed_stage
from minipar.train.verification.verify import table, verify
from tests.data_parallel.memory import Peak

MODEL = ModelConfig(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, max_seq_len=64, tie_embeddings=True)
SMALL = replace(VERIFY_DEFAULTS, model=MODEL)
EXPERTS = replace(MODEL, num_experts=4, top_k=2, group_tokens=4, balance_bias=True, tie_embeddings=False)
MESHES = [
    dict(dp=2, zero=3, dtype="bfloat16"),
    dict(pp=2, tp=2, microbatches=2),
    dict(dp=2, tp=2, zero=3, dtype="bfloat16", offload="cpu"),
    dict(pp=2, dp=2, zero=3, microbatches=2, dtype="bfloat16"),
    dict(dp=2, ep=2, tp=2, zero=2, model=EXPERTS),
    dict(tp=2, sequence_parallel=True, pad_vocab=True, model=replace(MODEL, vocab_size=257)),
]


def first_weights(world, config):
    """Every part of a parameter, or its master copy, that this rank starts from, and whether all of it has values."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    parts = [(placement_of(x), x.detach().clone()) for x, _ in state.optimizer.tensors_and_states()]
    held = [x for stage in state.stages for x in (*stage.parameters(), *stage.buffers())]
    return parts, not any(x.is_meta for x in held)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_rank_starts_from_its_part_of_one_processs_weights(mesh):
    config = replace(SMALL, **mesh)
    whole = Transformer(config.model, config.seed, dtype=config.torch_dtype)
    weights = {name: p.detach().to(config.torch_master_dtype) for name, p in whole.named_parameters()}
    for parts, complete in minipar.run(first_weights, config, world_size=config.world_size):
        assert complete
        for placement, value in parts:
            want = placement.slice_of(weights[placement.tied_to or placement.name])
            assert torch.equal(value, want), placement


def test_every_buffer_is_made_once():
    model = Transformer(EXPERTS, device="meta")
    with LiveBytes() as memory:
        fill_buffers(model)
    assert memory.now == sum(buffer.nbytes for buffer in model.buffers()) > 0


def test_the_reference_multiplies_as_the_run_does_unless_told():
    rounded, tokens = SMALL.choosing(products="mxfp4"), torch.arange(64)[None]
    loss = lambda config, **how: whole_model(config, **how).loss(tokens, tokens).item()  # noqa: E731
    assert loss(rounded, products=False) == loss(SMALL) != loss(rounded)


LARGE = ModelConfig(vocab_size=256, dim=128, num_layers=8, num_heads=4, max_seq_len=64)


def bytes_to_build(world, config):
    with Peak() as memory:
        state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    parameters = [p for stage in state.stages for p in stage.parameters()]
    return memory.peak, sum(p.nbytes for p in parameters)


@pytest.mark.parametrize("mesh", [dict(dp=4, zero=3), dict(tp=4), dict(pp=4, microbatches=4)], ids=str)
def test_building_holds_a_ranks_part_and_one_unit(mesh):
    config = replace(SMALL, model=LARGE, dtype="float32", **mesh)
    shapes = Transformer(LARGE, device="meta")
    unit = sum(p.nbytes for p in shapes.layers["0"].parameters())
    total = sum(p.nbytes for p in shapes.parameters())
    for peak, part in minipar.run(bytes_to_build, config, world_size=4):
        assert part < 0.4 * total
        held = part if config.zero == 3 else 2 * part  # DDP has buckets for the gradients
        assert part <= peak <= held + 1.5 * unit < total


def bytes_to_fill(world, config):
    mesh = Mesh(world, **config.mesh_sizes)
    (stage,) = own_stages(config, mesh, schedule_of(config))
    with Peak() as memory:
        stage = transformed_stage(config, mesh, world.device, stage)
    return memory.peak, sum(p.nbytes for p in stage.parameters())


def test_making_weights_needs_at_most_one_whole_parameter_more():
    config = replace(SMALL, model=replace(LARGE, vocab_size=4096), dtype="float32", tp=4)
    largest = max(p.nbytes for p in Transformer(config.model, device="meta").parameters())
    for peak, part in minipar.run(bytes_to_fill, config, world_size=4):
        assert part < peak <= part + largest


# A Llama --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A trained model, exported as a Llama; its parameters by name."""
    folder = tmp_path_factory.mktemp("llama")
    run = TrainConfig(model=replace(MODEL, tie_embeddings=False), out=folder / "run", verify_steps=0,
                      **dict(dp=2, steps=2, checkpoint_every=2, batch_size=4, seq_len=32, warmup=1))  # fmt: skip
    train(run)
    checkpoint = Checkpoint(newest_whole(folder / "run" / CHECKPOINTS))
    export_llama(checkpoint, folder / "llama")
    return folder / "llama", checkpoint


def cut_in_files(folder, to, files: int = 3) -> None:
    """The same Llama in several files."""
    to.mkdir()
    weights = load_file(folder / "model.safetensors")
    place = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        save_file({name: w for name, w in weights.items() if place[name] == file}, to / file)
    (to / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (to / "config.json").write_text((folder / "config.json").read_text())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [dict(dp=2, zero=3), dict(pp=2, tp=2, microbatches=2, zero=1)], ids=str)
def test_an_exported_model_comes_back_and_trains_as_one_process(llama, tmp_path, mesh):
    folder, checkpoint = llama
    cut_in_files(folder, tmp_path / "sharded")
    for init in (folder, tmp_path / "sharded"):
        config = replace(VERIFY_DEFAULTS, init=init, dtype="float32", steps=2, **mesh)
        assert config.model == replace(VERIFY_DEFAULTS.model, tie_embeddings=False)
        for parts, _ in minipar.run(first_weights, config, world_size=config.world_size):
            for placement, value in parts:
                assert torch.equal(value, checkpoint.read("parameter", placement)), placement
    result = verify(config)
    assert result.equal, table(result)
    half = replace(config, dtype="bfloat16", steps=1)
    result = verify(half)
    assert result.equal, table(result)


SAID = dict(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32,
)  # fmt: skip
THEIRS = {
    "mistral": dict(head_dim=6, sliding_window=32),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=6),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True),
}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("mistral", dict(tp=2)),
        ("qwen2", dict(tp=4, sequence_parallel=True)),
        ("qwen2", dict(pp=2, microbatches=2, zero=1)),
        ("qwen3", dict(tp=4, sequence_parallel=True)),
        ("qwen3", dict(dp=2, zero=3)),
        ("qwen3", dict(cp=2)),
        ("mixtral", dict(tp=2)),
        ("mixtral", dict(dp=4, ep=2, zero=3)),
        ("qwen3_moe", dict(dp=2, ep=2, tp=2, sequence_parallel=True)),
    ],
)
def test_a_folder_that_transformers_wrote_trains_on_meshes(tmp_path, family, mesh):
    """From weights that are random everywhere, biases and norms, too, and with the loss that transformers computes."""
    transformers = pytest.importorskip("transformers")
    said = transformers.AutoConfig.for_model(family, **SAID | THEIRS[family])
    theirs = transformers.AutoModelForCausalLM.from_config(said, experts_implementation="eager").double()
    with torch.no_grad():
        for p in theirs.parameters():
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype) / 10
    theirs.save_pretrained(tmp_path)
    config = TrainConfig(init=tmp_path, dtype="float64", batch_size=4, seq_len=32, steps=2, warmup=1, **mesh)
    tokens = torch.arange(64).view(2, 32) * 7 % 256
    ours = whole_model(config)(tokens)
    assert torch.allclose(ours, theirs(tokens).logits, rtol=1e-5, atol=1e-5)  # their norms are in float32
    result = verify(config)
    assert result.equal, table(result)


class Counted:
    """A weight in a file, unread; it counts the elements that are read of it."""

    def __init__(self, slice_of_file, read: list[int]):
        self._slice, self._read = slice_of_file, read

    def __getitem__(self, index):
        value = self._slice[index]
        self._read.append(value.numel())
        return value


def test_a_rank_reads_its_part_alone(llama, monkeypatch):
    values = initial_values(replace(VERIFY_DEFAULTS, init=llama[0], dtype="float32"))
    whole = Placement.whole("layers.0.mlp.up.weight", (96, 32))
    tensor, read, plain = values(whole), [], LlamaWeights.slice
    monkeypatch.setattr(LlamaWeights, "slice", lambda self, name: Counted(plain(self, name), read))
    cuts = [
        whole.shard(0, 1, 4),
        whole.shard(1, 0, 4),
        whole.flatten_range(100, 500),
        whole.flatten_range(7, 7),
    ]
    for part in (*cuts, cuts[1].flatten_range(3, 50)):
        read.clear()
        assert torch.equal(values(part), part.slice_of(tensor))
        assert sum(read) == part.numel


def test_a_tied_copy_starts_from_what_it_is_tied_to(tmp_path, llama):
    folder, _ = llama
    config = replace(VERIFY_DEFAULTS, init=folder)
    last = Transformer(replace(config.model, tie_embeddings=True), layers=[3], first=False, device="meta")
    place_whole(last)
    values = initial_values(config)
    tied = values(placement_of(last.head.weight))
    assert torch.equal(tied, values(Placement.whole("embedding.weight", tied.shape)))


def test_sizes_come_from_the_folder_unless_they_were_given(llama, tmp_path):
    folder, _ = llama
    config = TrainConfig(init=folder, seq_len=32)
    assert (config.model.dim, config.model.num_kv_heads, config.model.tie_embeddings) == (32, 2, False)
    given = TrainConfig(init=folder, seq_len=32, model=ModelConfig(dim=32, num_layers=4, dropout=0.1))
    assert given.model == replace(config.model, dropout=0.1)
    assert replace(config, steps=3).model == config.model
    with pytest.raises(
        ValueError, match=r"model\.dim=64, but the Llama of init=.* has dim=32; use that, or leave"
    ):
        TrainConfig(init=folder, seq_len=32, model=ModelConfig(dim=64))
    with pytest.raises(ValueError, match=r"init=.* is a Llama, and num_experts=4: it has none; use 0"):
        TrainConfig(init=folder, seq_len=32, moe=4)
    with pytest.raises(ValueError, match=r"init=.* is a Llama, and parallel_block=True: .*; leave it out"):
        TrainConfig(init=folder, seq_len=32, model=ModelConfig(parallel_block=True))
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        TrainConfig(init=tmp_path, seq_len=32)
    with pytest.raises(ValueError, match="seq_len=256 exceeds max_seq_len=64"):
        TrainConfig(init=folder)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    for command in (verify, train, check_initial_weights):
        with pytest.raises(ValueError, match="lacks embedding.weight, .*38 of 39 weights"):
            command(TrainConfig(init=tmp_path, seq_len=32, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
