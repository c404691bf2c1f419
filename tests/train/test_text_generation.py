"""Every mesh writes what one process writes, from a checkpoint of whatever mesh."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh, Placement, placement_of
from minipar.model import Transformer, generate
from minipar.model.cache import GenerationCache, KeyValueCache
from minipar.pipeline import partition
from minipar.tensor_parallel import tensor_parallel
from minipar.train import generate_text, text_generation, train
from minipar.train.checkpoint.export import full_parameters
from minipar.train.checkpoint.restore import Checkpoint, checkpoints, find_damage, newest_whole
from minipar.train.checkpoint.tensor_file import TensorFile
from minipar.train.state import BUFFER
from minipar.train.text_generation import generate_on_mesh, load_stage
from tests.examples import examples
from tests.model.texts import ROUTED_ALONE, ROUTED_TOGETHER, draw_tokens, loud_model
from tests.strategies import seeds

MESHES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8]
FEW = [(tp, pp) for tp, pp in MESHES if tp * pp <= 4]
WARM = st.sampled_from([0.7, 30.0])  # the logits of a loud model are large


@st.composite
def configs(draw, tp: int, pp: int) -> ModelConfig:
    num_heads = tp * draw(st.integers(1, 2))
    fitting = [kv for kv in (1, 2, 4, 8) if num_heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)]
    return ModelConfig(
        vocab_size=16,
        dim=num_heads * 4,
        num_layers=pp + draw(st.integers(0, 2)),
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from(fitting)),
        hidden_dim=16,
        max_seq_len=12,
        tie_embeddings=draw(st.booleans()),
        attention=draw(st.sampled_from(["fused", "plain", "flash"])),
        **draw(st.sampled_from([{}, ROUTED_ALONE, *ROUTED_TOGETHER])),
    )


def write_and_compare(world, mesh_sizes, config, prompt, num_tokens, temperatures, seed):
    """On a rank: does the mesh write what the whole model writes? Returns what went over the wire between stages."""
    mesh, model = Mesh(world, **mesh_sizes), loud_model(config, seed)
    stage = partition(model, mesh.sizes["pp"])[mesh.coordinates.pp]
    tensor_parallel(stage, mesh.comm("tp"))
    for temperature in temperatures:
        got = generate_on_mesh(stage, mesh, prompt, num_tokens, temperature, seed)
        assert got.shape == (*prompt.shape[:-1], prompt.shape[-1] + num_tokens)
        want = generate(model, prompt, num_tokens, temperature, seed)
        assert torch.equal(got, want), (world.rank, temperature, got.tolist(), want.tolist())
    return mesh.comm("pp").traffic.by_kind


@examples(15)
@given(st.data())
def test_every_mesh_writes_what_one_process_writes(data):
    tp, pp = data.draw(st.sampled_from(MESHES))
    config, seed = data.draw(configs(tp, pp)), data.draw(seeds)
    batch, length, num_tokens = (data.draw(st.integers(*ends)) for ends in ((0, 2), (1, 14), (0, 6)))
    prompt = draw_tokens(seed, max(1, batch), length)
    prompt = prompt if batch else prompt[0]
    args = {"tp": tp, "pp": pp}, config, prompt, num_tokens, (0.0, data.draw(WARM)), seed
    minipar.run(write_and_compare, *args, world_size=tp * pp)


SMALL = ModelConfig(vocab_size=16, dim=32, num_layers=2, num_heads=8, num_kv_heads=4, max_seq_len=24)


def kept_heads_swapped(mesh, stage):
    """The kept heads of the first tp rank are in another order than its new ones."""

    def swapped(self, k, v, extend=KeyValueCache.extend):
        keys, values = extend(self, k, v)
        return torch.cat((keys[:, :, :-1].flip(1), keys[:, :, -1:]), dim=2), values

    return mock.patch.object(KeyValueCache, "extend", swapped) if mesh.coordinates.tp == 0 else nullcontext()


def heads_of_a_neighbour(mesh, stage):
    """A tp rank has and keeps the keys of another rank's heads."""
    for block in stage.layers.values():
        weight = block.attention.k.weight
        weight.data.copy_(
            mesh.comm("tp").all_gather(weight.data).roll(len(weight), 0).chunk(2)[mesh.coordinates.tp]
        )
    return nullcontext()


def positions_stand_still(mesh, stage):
    """The second stage takes every new token for the first."""
    still = lambda self, num_tokens, device: torch.arange(num_tokens)  # noqa: E731
    return (
        mock.patch.object(GenerationCache, "positions", still) if mesh.coordinates.pp == 1 else nullcontext()
    )


def the_first_stage_writes_its_own_text(mesh, stage):
    """The choice is not told to the others."""
    alone = lambda self, x, root=0: x if self.rank == root else torch.zeros_like(x)  # noqa: E731
    return mock.patch.object(Comm, "broadcast", alone)


def write_with_fault(world, fault):
    mesh, model = Mesh(world, tp=2, pp=2), loud_model(SMALL)
    stage = tensor_parallel(partition(model, 2)[mesh.coordinates.pp], mesh.comm("tp"))
    want = generate(model, [1, 2, 3], 12)
    with nullcontext() if fault is None else fault(mesh, stage):
        return torch.equal(generate_on_mesh(stage, mesh, [1, 2, 3], 12), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fault",
    [
        None,
        kept_heads_swapped,
        heads_of_a_neighbour,
        positions_stand_still,
        the_first_stage_writes_its_own_text,
    ],
)
def test_a_fault_on_the_mesh_is_seen(fault):
    right = minipar.run(write_with_fault, fault, world_size=4)
    assert all(right) == (fault is None)


@pytest.mark.parametrize(("prompt", "num_tokens"), [(1, 1), (5, 7), (3, 0)])
def test_between_stages_every_token_is_sent_once(prompt, num_tokens):
    args = {"pp": 2}, SMALL, draw_tokens(0, 2, prompt), num_tokens, (0.0,), 0
    first, last = minipar.run(write_and_compare, *args, world_size=2)
    assert first.get("send", 0) == (2 * (prompt + num_tokens - 1) * SMALL.dim * 8 if num_tokens else 0)
    assert last.get("send", 0) == 0


RUNS = {  # how the model was trained
    "dense": (dict(num_kv_heads=2), dict(dp=2, tp=2, zero=3)),
    "tied": (dict(tie_embeddings=True), dict(pp=2, dp=2, zero=1)),
    "experts": (dict(num_experts=4, balance_bias=True, tie_embeddings=True), dict(dp=2, ep=2, pp=2)),
}


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tmp_path_factory) -> tuple[Path, Transformer]:
    """A run's folder, and its model in one process."""
    model, mesh = RUNS[request.param]
    config = TrainConfig(
        model=ModelConfig(dim=32, num_layers=4, num_heads=4, max_seq_len=32, **model),
        **dict(batch_size=4, seq_len=16, steps=2, verify_steps=0, trace_steps=0, warmup=0, lr=0.01),
        **dict(dtype="float64", checkpoint_every=1, out=tmp_path_factory.mktemp("run")),
        **mesh,
    )
    train(config)
    whole = Transformer(config.model, dtype=torch.float64)
    checkpoint = Checkpoint(newest_whole(config.folder / "checkpoints"))
    biases = {
        name: checkpoint.read(BUFFER, Placement.whole(name, x.shape)) for name, x in whole.named_buffers()
    }
    whole.load_state_dict(full_parameters(checkpoint) | biases)
    return config.folder, whole


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("tp", "pp"), FEW)
def test_any_mesh_goes_on_from_a_checkpoint_of_another(trained, tp, pp):
    folder, model = trained
    for temperature in (0.0, 0.7):
        text = generate_text(folder, "The é", 30, temperature, tp, pp, seed=3)
        want = generate(model, list("The é".encode()), 30, temperature, seed=3)
        assert text == bytes(want.tolist()).decode(errors="replace")
    assert len(want.unique()) > 16, "a text that any model might write"


def sample(world, config, path, bytes_per_rank):
    """On a rank: the text, and the bytes of weights this rank loaded for it."""
    loaded, plain = [], text_generation.load_stage

    def load_and_weigh(*args):
        stage = plain(*args)
        loaded.extend(x.nbytes for x in stage.parameters())
        return stage

    with (
        mock.patch.object(text_generation, "load_stage", load_and_weigh),
        mock.patch.object(text_generation, "SAMPLE_BYTES_PER_RANK", bytes_per_rank),
    ):
        return text_generation.sample_text(world, config, path, 20), sum(loaded)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("bytes_per_rank", "ranks", "tp"), [(1 << 30, 1, 1), (1, 4, 1), (1, 8, 2)])
def test_a_sample_uses_as_few_ranks_as_hold_the_weights(trained, bytes_per_rank, ranks, tp):
    folder, model = trained
    config = TrainConfig(model=model.config, dtype="float64", seq_len=16, batch_size=8, dp=8 // tp, tp=tp)
    args = config, newest_whole(folder / "checkpoints"), bytes_per_rank
    texts, loaded = zip(*minipar.run(sample, *args, world_size=8))
    want = generate(model, list(b"The "), 20, 0.7)
    assert texts == (bytes(want.tolist()).decode(errors="replace"), *[None] * 7)
    whole = sum(x.nbytes for x in model.parameters())
    assert sum(1 for num_bytes in loaded if num_bytes) == ranks
    assert max(loaded) <= whole if ranks == 1 else max(loaded) < whole / 2


def check_weights(world, mesh_sizes, path, whole):
    """On a rank: is its stage the part of the checkpoint's model that its placements say? Returns the names it has."""
    stage = load_stage(Checkpoint(path), Mesh(world, **mesh_sizes))
    for own_name, weight in stage.named_parameters():
        placement = placement_of(weight)
        name = placement.tied_to or placement.name
        assert torch.equal(weight, placement.slice_of(whole[name])), own_name
        if mesh_sizes["tp"] > 1 and weight.dim() > 1 and "router" not in name:
            assert weight.numel() < whole[name].numel(), own_name
    for name, bias in stage.named_buffers():
        assert bias.any(), "training has not moved it"
        assert torch.equal(bias, whole[name]), name
    return {placement_of(weight).name for weight in stage.parameters()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("tp", "pp"), FEW)
def test_a_stage_has_its_parts_of_the_weights_and_no_more(trained, tp, pp):
    folder, model = trained
    path, whole = newest_whole(folder / "checkpoints"), model.state_dict()
    args = {"tp": tp, "pp": pp}, path, whole
    names = minipar.run(check_weights, *args, world_size=tp * pp)
    assert set().union(*names) >= {name for name, _ in model.named_parameters()}


def test_impossible_requests_are_refused_before_any_rank_starts(trained, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.setattr(
        "minipar.train.text_generation.run", lambda *args, **kwargs: pytest.fail("a rank was started")
    )
    for says, request in {
        "prompt='' is empty": dict(prompt=""),
        "num_tokens=-1": dict(num_tokens=-1),
        "temperature=-1": dict(temperature=-1),
        "tp=3 does not divide num_heads=4; use 1, 2 or 4": dict(tp=3),
        "tp=0 does not divide": dict(tp=0),
        "pp=5 stages of num_layers=4 layers; use 1 to 4": dict(pp=5),
        "pp=0 stages": dict(pp=0),
        "no whole checkpoint; train with --checkpoint-every": dict(run_folder=tmp_path),
    }.items():
        with pytest.raises(ValueError, match=says):
            generate_text(**dict(run_folder=folder, prompt="The ") | request)


def damage_first_bit_of(path: Path, prefix: str) -> None:
    file, data = TensorFile(path), bytearray(path.read_bytes())
    key = next(key for key in file._header if key.startswith(prefix))
    data[len(file.header_bytes) + file._header[key]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def test_damaged_optimizer_state_is_not_read_for_a_text(trained, tmp_path):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    newest, _ = checkpoints(folder / "checkpoints")
    want = generate_text(folder, "The ", 3)
    damage_first_bit_of(newest / "rank-00000.safetensors", "exp_avg/")
    assert "exp_avg" in find_damage(newest)
    assert generate_text(folder, "The ", 3) == want


def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    newest, _ = checkpoints(folder / "checkpoints")
    damage_first_bit_of(newest / "rank-00000.safetensors", "parameter/")
    with pytest.warns(UserWarning, match="step-00000002 is damaged"):
        assert generate_text(folder, "The ", 3).startswith("The ")
