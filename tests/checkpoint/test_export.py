"""An export has one tensor at a time in memory, and is refused before it reads anything where it cannot be written."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import minipar
from minipar.checkpoint.export import export_model, full_parameters, llama_config
from minipar.checkpoint.restore import Checkpoint, newest_whole
from minipar.checkpoint.saver import Saver, StoredPart
from minipar.config.llama_config import sizes_from
from minipar.config.model_config import ModelConfig
from minipar.mesh import Placement


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


def test_latent_attention_is_no_llama():
    with pytest.raises(ValueError, match="kv_latent_dim=8: a Llama has no latent attention; export under"):
        llama_config(ModelConfig(kv_latent_dim=8))
    with pytest.raises(
        ValueError, match="is a Llama, and kv_latent_dim=8: it has no latent attention; leave it out"
    ):
        sizes_from(Path("llama"), ModelConfig(kv_latent_dim=8), ())


def test_a_parallel_block_is_no_llama():
    with pytest.raises(
        ValueError, match="parallel_block=True: a Llama's MLP has a norm of its own; export under"
    ):
        llama_config(ModelConfig(parallel_block=True))
