"""Checkpoints in torch's distributed format: from any mesh to any other, bit for bit, ours to torch's and back."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import minipar
from minipar.config.model_config import ModelConfig
from minipar.data_parallel import FSDP, ZeroOptimizer
from minipar.extras.checkpoints import dcp
from minipar.mesh import Mesh, Placement, place_whole
from minipar.model import Transformer
from minipar.tensor_parallel import tensor_parallel
from tests.examples import examples

CONFIG = ModelConfig(dim=8, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=16, max_seq_len=8)


def model(seed=0):
    torch.manual_seed(seed)
    made = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return made


def sharded(world, sizes, kind, seed):
    """A model on a mesh of dp x tp: its optimizer too, after a step, if `kind` is "zero"."""
    mesh = Mesh(world, **sizes)
    stage = tensor_parallel(model(seed), mesh.comm("tp"))
    if kind == "fsdp":
        return FSDP(stage, mesh.comm("dp"), units=type(stage.layers["0"])), None
    if kind == "whole":
        return stage, None
    optimizer = ZeroOptimizer(stage.parameters(), torch.optim.AdamW, mesh.comm("dp"), lr=0.1)
    stage(torch.arange(8)[None] + mesh.comm("dp").rank).square().sum().backward()
    optimizer.step()
    return stage, optimizer


def whole(parts):
    """The values of the parts, copied."""
    return {key: (placement, values.clone()) for key, (placement, values) in parts.items()}


def written(world, sizes, kind, folder):
    stage, optimizer = sharded(world, sizes, kind, seed=0)
    parts = {**dcp.parameter_parts(stage), **({} if optimizer is None else dcp.optimizer_parts(optimizer))}
    dcp.save(folder, parts, world)
    return whole(parts)


def read(world, sizes, kind, folder):
    stage, _ = sharded(world, sizes, kind, seed=1)
    parts = dcp.parameter_parts(stage)
    dcp.load(folder, parts)
    return whole(parts)


MESHES = [dict(tp=1), dict(dp=2), dict(tp=2), dict(dp=2, tp=2), dict(dp=3), dict(tp=4)]
meshes = st.sampled_from(MESHES)


def ranks_of(sizes):
    return sizes.get("dp", 1) * sizes.get("tp", 1)


@given(there=meshes, here=meshes, how=st.tuples(*[st.sampled_from(["whole", "zero", "fsdp"])] * 2))
@examples(6)
def test_any_mesh_reads_what_any_mesh_wrote_bit_for_bit(tmp_path_factory, there, here, how):
    folder = tmp_path_factory.mktemp("dcp")
    stored = minipar.run(written, there, how[0], folder, world_size=ranks_of(there))
    # As torch reads it, in one process without placements.
    dcp_to_torch_save(folder, folder / "whole.pt")
    full = torch.load(folder / "whole.pt")
    for parts in stored:
        for key, (placement, values) in parts.items():
            assert torch.equal(placement.slice_of(full[key]), values)
    for parts in minipar.run(read, here, how[1], folder, world_size=ranks_of(here)):
        for key, (placement, values) in parts.items():
            assert torch.equal(placement.slice_of(full[key]), values)
    if how[0] == "zero":
        assert any(key.endswith(".exp_avg_sq") for key in full)


class _FullError(Exception):
    """The error of a disk that is full after some boxes."""


def overwritten(folder):
    """Save ones, begin to save twos over them, and save threes; return what can be read after each."""
    layer = nn.Linear(4, 4)
    place_whole(layer)
    parts, seen = dcp.parameter_parts(layer), []

    def save(value):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(value)
        dcp.save(folder, parts)

    def stored():
        into = {key: (placement, torch.zeros_like(x)) for key, (placement, x) in parts.items()}
        try:
            dcp.load(folder, into)
        except (FileNotFoundError, ValueError) as error:
            return type(error).__name__
        return {x.unique().item() for _, x in into.values()}

    def full(planner, item):
        if item.index.fqn == "bias":
            raise _FullError
        return resolve(planner, item)

    resolve = dcp._SavePlanner.resolve_data
    save(1.0)
    seen.append(stored())
    dcp._SavePlanner.resolve_data = full
    try:
        save(2.0)
    except (_FullError, CheckpointException):
        seen.append(stored())
    finally:
        dcp._SavePlanner.resolve_data = resolve
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(3.0)
    return [*seen, stored()]


def test_an_interrupted_save_is_not_read_as_a_checkpoint(tmp_path):
    """Were the old metadata still there, they would point at new values, or at none."""
    assert overwritten(tmp_path) == [{1.0}, "FileNotFoundError", {3.0}]


def test_a_save_that_has_not_begun_to_write_keeps_the_checkpoint(tmp_path):
    parts = {"w": (Placement.whole("w", (2, 2)), torch.ones(2, 2))}
    dcp.save(tmp_path, parts)
    with pytest.raises(AttributeError):
        dcp.save(tmp_path, {"w": (parts["w"][0], "no tensor")})
    dcp.load(tmp_path, {"w": (parts["w"][0], read := torch.zeros(2, 2))})
    assert read.sum() == 4


def overwritten_by_all(world, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (0, 1):
            parts = whole(dcp.parameter_parts(sharded(world, {"dp": 2}, "fsdp", seed)[0]))
            dcp.save(folder, parts, world)
    dcp.load(folder, into := {key: (p, torch.zeros_like(x)) for key, (p, x) in parts.items()})
    return all(torch.equal(into[key][1], x) for key, (_, x) in parts.items())


def test_a_save_over_another_one_is_the_newer_one(tmp_path):
    assert minipar.run(overwritten_by_all, tmp_path, world_size=2) == [True, True]


def on_four_ranks_of_torch(function, *arguments):
    """Run on a pool of exactly four: torch's meshes use the default group, which is that of the whole pool."""
    minipar.shutdown()
    return minipar.run(function, *arguments, world_size=4)


def torch_writes(world, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = {
        "a": torch.arange(42.0).view(6, 7),
        "b": torch.arange(5.0),
        "c": torch.arange(12.0).view(3, 2, 2),
    }
    cuts = {"a": [Shard(0), Shard(1)], "b": [Shard(0), Replicate()], "c": [Replicate(), Shard(2)]}
    state = {name: distribute_tensor(x, mesh, cuts[name]) for name, x in values.items()}
    torch_dcp.save(state, checkpoint_id=str(folder))
    return values


def torch_reads(world, folder, names):
    mesh = init_device_mesh("cpu", (4,))
    state = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0) if shape else Replicate()])
        for name, shape in names.items()
    }
    torch_dcp.load(state, checkpoint_id=str(folder))
    return {name: x.full_tensor() for name, x in state.items() if isinstance(x, DTensor)}


@given(data=st.data())
@examples(10)
def test_parts_of_any_form_are_read_from_dtensors(dtensors, data):
    folder, values = dtensors
    name = data.draw(st.sampled_from(sorted(values)))
    placement = Placement.whole(name, values[name].shape)
    for dim in range(values[name].dim()):
        count = data.draw(st.integers(1, 4))
        placement = placement.shard(dim, data.draw(st.integers(0, count - 1)), count)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, placement.numel))
        placement = placement.flatten_range(start, data.draw(st.integers(start, placement.numel)))
    part = torch.full(placement.local_shape, -1.0)
    dcp.load(folder, {name: (placement, part)})
    assert torch.equal(part, placement.slice_of(values[name]))


@pytest.fixture(scope="module")
def dtensors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtensors")
    values = on_four_ranks_of_torch(torch_writes, folder)[0]
    return folder, values


@pytest.mark.thorough
def test_torch_reads_ours_as_dtensors(tmp_path):
    stored = minipar.run(written, dict(dp=2, tp=2), "zero", tmp_path, world_size=4)
    shapes = {key: placement.global_shape for parts in stored for key, (placement, _) in parts.items()}
    full = on_four_ranks_of_torch(torch_reads, tmp_path, shapes)[0]
    for parts in stored:
        for key, (placement, values) in parts.items():
            assert torch.equal(placement.slice_of(full[key]), values)


def test_each_element_is_stored_once(tmp_path):
    """Copies over tp and dp are written by one rank: the boxes have the elements of one model."""
    minipar.run(written, dict(dp=2, tp=2), "whole", tmp_path, world_size=4)
    metadata = torch_dcp.FileSystemReader(str(tmp_path)).read_metadata()
    elements = sum(
        chunk.sizes.numel() for tensor in metadata.state_dict_metadata.values() for chunk in tensor.chunks
    )
    assert elements == sum(p.numel() for p in model().parameters())


def test_without_ranks_a_process_writes_alone(tmp_path):
    layer = nn.Linear(3, 2)
    place_whole(layer)
    dcp.save(tmp_path, dcp.parameter_parts(layer))
    other = nn.Linear(3, 2)
    place_whole(other)
    dcp.load(tmp_path, dcp.parameter_parts(other))
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)


def test_what_is_not_stored_so_is_named(dtensors):
    folder, _ = dtensors
    with pytest.raises(ValueError, match="has no tensor 'aa'; it has a, b or c"):
        dcp.load(folder, {"aa": (Placement.whole("aa", (2,)), torch.zeros(2))})
    with pytest.raises(ValueError, match=r"b has shape \(5,\), expected \(6,\)"):
        dcp.load(folder, {"b": (Placement.whole("b", (6,)), torch.zeros(6))})


def test_a_box_read_from_the_wrong_place_is_seen(dtensors, monkeypatch):
    folder, values = dtensors
    right = dcp._LoadPlanner._item

    def from_the_start(self, *arguments):
        item = right(self, *arguments)
        return dataclasses.replace(item, storage_offsets=torch.Size([0] * len(item.storage_offsets)))

    monkeypatch.setattr(dcp._LoadPlanner, "_item", from_the_start)
    placement = Placement.whole("a", (6, 7)).split(0, 1, 4)
    part = torch.zeros(placement.local_shape)
    dcp.load(folder, {"a": (placement, part)})
    assert not torch.equal(part, placement.slice_of(values["a"]))


def trained(world, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + world.rank))
        model(x.to(model.weight.dtype)).float().square().sum().backward()
        optimizer.step()


def resumed_through_dcp(world, folder, cls, options):
    """Masters after two more steps: without a stop, and in a new model and optimizer that have loaded a checkpoint."""

    def begin(seed):
        torch.manual_seed(seed)
        model = nn.Linear(6, 5, dtype=torch.bfloat16)
        optimizer = ZeroOptimizer(model.named_parameters(), cls, world, master_dtype=torch.float32, **options)
        return model, optimizer

    model, optimizer = begin(0)
    trained(world, model, optimizer, range(3))
    dcp.save(folder, {**dcp.parameter_parts(model), **dcp.optimizer_parts(optimizer)}, world)
    other, fresh = begin(1)
    dcp.load(folder, dcp.parameter_parts(other))
    dcp.load_optimizer(folder, fresh)
    for m, o in ((model, optimizer), (other, fresh)):
        trained(world, m, o, range(3, 5))
    return [o.full_state_dict()["state"] for o in (optimizer, fresh)]


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.AdamW, {"lr": 0.1}), (torch.optim.NAdam, {"lr": 0.1, "offload": "disk"})],
)
def test_a_new_optimizer_goes_on_from_what_was_stored(tmp_path, cls, options):
    for want, got in minipar.run(resumed_through_dcp, tmp_path, cls, options, world_size=2):
        assert want.keys() == got.keys()
        for number, state in want.items():
            assert state.keys() == got[number].keys() >= {"step", "exp_avg", "master"}
            assert all(torch.equal(x, got[number][key]) for key, x in state.items())


def without_state(world, folder):
    optimizer = ZeroOptimizer((model := nn.Linear(3, 3)).named_parameters(), torch.optim.AdamW, world, lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"no state before its first step.*load_optimizer\(folder, optimizer\)"
    ):
        dcp.optimizer_parts(optimizer)
    dcp.save(folder, dcp.parameter_parts(model), world)
    with pytest.raises(ValueError, match="has no optimizer state of .*; save optimizer_parts"):
        dcp.load_optimizer(folder, optimizer)
    for call in (
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
        lambda: get_state_dict(model, optimizer),
        lambda: optimizer.state[model.weight],
    ):
        with pytest.raises(
            RuntimeError, match=r"in shards.*use full_state_dict\(\) and load_full_state_dict\(\)"
        ):
            call()


def test_a_stateless_optimizer_and_torchs_functions_are_refused(tmp_path):
    minipar.run(without_state, tmp_path, world_size=2)


def torch_optimizer_resumed(world, folder):
    """Parameters after two more steps of torch's AdamW over FSDP's shards: without a stop, and loaded into new objects."""

    def begin(seed):
        torch.manual_seed(seed)
        model = FSDP(nn.Linear(6, 5), world)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps(model, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model(x).square().sum().backward()
            optimizer.step()

    model, optimizer = begin(0)
    steps(model, optimizer, range(3))
    dcp.save(folder, {**dcp.parameter_parts(model), **dcp.optimizer_parts(optimizer)}, world)
    other, fresh = begin(1)
    dcp.load(folder, dcp.parameter_parts(other))
    dcp.load_optimizer(folder, fresh)
    for m, o in ((model, optimizer), (other, fresh)):
        steps(m, o, range(3, 5))
    return model.full_state_dict(), other.full_state_dict()


def test_torchs_optimizer_over_fsdp_is_stored_and_goes_on(tmp_path):
    for want, got in minipar.run(torch_optimizer_resumed, tmp_path, world_size=2):
        assert all(torch.equal(x, got[name]) for name, x in want.items())
