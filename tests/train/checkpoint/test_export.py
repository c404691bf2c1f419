"""An export has one tensor at a time in memory, and is refused before it reads anything where it cannot be written."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import minipar
from minipar.config.llama_config import sizes_from
from minipar.config.model_config import ModelConfig
from minipar.mesh import Placement, place_whole, placement_of
from minipar.model import Transformer, from_huggingface
from minipar.train.checkpoint.export import export_llama, export_model, full_parameters, llama_config
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.checkpoint.saver import Saver, StoredPart
from minipar.train.data.tokenizer import Tokenizer, codec_of_run


def save(world, folder):
    """Three parameters, cut over the ranks, and optimizer state, which is not exported."""
    parts = []
    for name in ("a", "b", "c"):
        placement = Placement.whole(name, (5, 4)).shard(0, world.rank, world.size)
        x = placement.slice_of(torch.arange(20.0).view(5, 4) + ord(name))
        parts += [StoredPart("parameter", placement, x), StoredPart("exp_avg", placement, x)]
    Saver(world, folder, wait=True).save(1, parts, {"model": {"dim": 4}})


@pytest.fixture
def stored(tmp_path) -> Checkpoint:
    minipar.run(save, tmp_path / "checkpoints", world_size=2)
    return Checkpoint(newest_whole(tmp_path / "checkpoints"))


@pytest.mark.thorough
def test_a_model_is_exported_a_tensor_at_a_time(stored, tmp_path, monkeypatch):
    alive, read = [], Checkpoint.read

    def counted(self, kind, wanted):
        assert not any(there() is not None for there in alive), "an earlier tensor is still in memory"
        x = read(self, kind, wanted)
        alive.append(weakref.ref(x))
        return x

    want = full_parameters(stored)
    monkeypatch.setattr(Checkpoint, "read", counted)
    export_model(stored, tmp_path / "model.safetensors")
    assert len(alive) == 3
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["minipar"]) == {"dim": 4}
        assert set(file.keys()) == want.keys()
        assert all(torch.equal(file.get_tensor(name), want[name]) for name in want)


def test_a_folder_is_not_a_file_to_export_to(stored, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder; give a file, such as .*model\.safetensors"):
        export_model(stored, tmp_path)


def save_model(world, folder, extra):
    model = Transformer(ModelConfig(**extra["model"]))
    place_whole(model)
    parts = [StoredPart("parameter", placement_of(p), p) for p in model.parameters()]
    Saver(world, folder / "checkpoints", wait=True).save(1, parts, extra)


SIZES = dict(vocab_size=300, dim=8, num_layers=1, num_heads=2, max_seq_len=32)
TEXT = "über alle Ränge 🙂\n\nthe <s> next  rank"


def exported(folder, codec: str) -> Path:
    minipar.run(save_model, folder, {"model": SIZES, "codec": codec}, world_size=1)
    export_llama(Checkpoint(newest_whole(folder / "checkpoints")), folder / "llama")
    return folder / "llama"


def test_an_export_ends_no_text_by_a_default(tmp_path):
    """Without the three, transformers takes tokens 1 and 2 for the begin and the end of a text."""
    folder = exported(tmp_path, "ids")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        assert [config[f"{token}_token_id"] for token in ("bos", "eos", "pad")] == [None] * 3
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("codec", ["bytes", "tokenizer"])
def test_an_exported_tokenizer_encodes_as_the_run_did(codec, tmp_path):
    from tokenizers import Tokenizer as Theirs

    if codec == "tokenizer":
        (tmp_path / "tokenizer.json").write_text(own_tokenizer())
        codec = Tokenizer(tmp_path / "tokenizer.json").digest
    ours = codec_of_run(tmp_path, {"codec": codec})
    theirs = Theirs.from_file(str(exported(tmp_path, codec) / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT), skip_special_tokens=False) == ours.decode(ours.encode(TEXT))


def own_tokenizer() -> str:
    """A tokenizer.json that adds special tokens, and cuts a text to 4 tokens: a run uses neither."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>"])
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(4)
    return made.to_str()


def test_another_tokenizer_in_the_runs_folder_is_not_exported(tmp_path):
    (tmp_path / "tokenizer.json").write_text(own_tokenizer())
    with pytest.raises(ValueError, match="is not the tokenizer that the run was trained with"):
        exported(tmp_path, "another")
    assert not (tmp_path / "llama").exists()


def test_latent_attention_is_no_llama():
    with pytest.raises(ValueError, match="kv_latent_dim=8: a Llama has no latent attention; export under"):
        llama_config(ModelConfig(kv_latent_dim=8))
    with pytest.raises(
        ValueError, match="is a Llama, and kv_latent_dim=8: it has no latent attention; leave it out"
    ):
        sizes_from(Path("llama"), ModelConfig(kv_latent_dim=8), ())


def test_biases_with_norms_of_heads_are_in_no_family():
    with pytest.raises(
        ValueError,
        match="qk_norm=True with qkv_bias=True is in none of llama, mistral, qwen2, qwen3, mixtral or qwen3_moe",
    ):
        llama_config(ModelConfig(qkv_bias=True, qk_norm=True))


MIXTURE = dict(num_experts=3, top_k=2, capacity_factor=None, moe_every=1, num_layers=2)


@pytest.mark.parametrize("more", [{}, dict(qk_norm=True, head_dim=6), dict(num_experts=2)], ids=str)
def test_experts_are_exported_one_by_one_and_come_back(tmp_path, more):
    model = {**SIZES, **MIXTURE, **more}
    minipar.run(save_model, tmp_path, {"model": model, "codec": "ids"}, world_size=1)
    checkpoint = Checkpoint(newest_whole(tmp_path / "checkpoints"))
    export_llama(checkpoint, tmp_path / "llama")
    config, weights = from_huggingface(tmp_path / "llama")
    want = full_parameters(checkpoint)
    assert config == ModelConfig(**model)
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(capacity_factor=1.0), "capacity_factor=1.0: experts of .* have capacity_factor=None"),
        (dict(moe_every=2), "moe_every=2"),
        (dict(shared_dim=8), "shared_dim=8"),
        (dict(balance_bias=True), "balance_bias=True"),
        (dict(router="noisy_top_k"), "router=noisy_top_k"),
        (dict(top_k=1), "top_k=1"),
        (dict(qkv_bias=True), "num_experts=3 with qkv_bias=True is in none of"),
    ],
    ids=str,
)
def test_experts_that_no_family_has_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        llama_config(ModelConfig(**{**SIZES, **MIXTURE, **changes}))


def test_a_parallel_block_is_no_llama():
    with pytest.raises(
        ValueError, match="parallel_block=True: a Llama's MLP has a norm of its own; export under"
    ):
        llama_config(ModelConfig(parallel_block=True))
