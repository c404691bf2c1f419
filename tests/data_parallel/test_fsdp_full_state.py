"""Saving and loading what FSDP has sharded: whole, or refused; never one rank's part without a word."""

import copy
import io
from functools import partial

import pytest
import torch
from safetensors.torch import save_model
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict

import minipar
from minipar.data_parallel import FSDP
from minipar.tensor_parallel import full_state_dict
from tests.data_parallel.wrapped import loss_of, network, samples


def part_frozen():
    model = network().append(nn.LayerNorm(3).double())
    model[3].requires_grad_(False)
    return model


def saves_and_loads(model, fsdp):
    """Return what would save or load this rank's part of the parameters."""
    state = part_frozen().state_dict()
    found = [lambda: model.load_state_dict(state, strict=False, assign=True)]
    for m in (fsdp, model, model[0], model[3]):  # the wrapper, the module, a unit, a frozen layer
        found += [m.state_dict, lambda m=m: m.load_state_dict(m.state_dict(keep_vars=True))]
    return found


def refused(world):
    model = part_frozen()
    fsdp = FSDP(model, world, nn.Linear)
    before = fsdp.full_state_dict()
    for _ in range(2):  # before and after a step
        for use in saves_and_loads(model, fsdp):
            with pytest.raises(RuntimeError, match=r"this rank's part alone; use (load_)?full_state_dict"):
                use()
        for part in (model, model[0], model[3]):
            for copying in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
                with pytest.raises(TypeError, match="FSDP cannot be copied or pickled"):
                    copying(part)
        assert all(torch.equal(x, before[name]) for name, x in fsdp.full_state_dict().items())
        loss_of(fsdp, world.rank).backward()
    del fsdp
    with pytest.raises(RuntimeError, match="this rank's part alone"):
        model.state_dict()


@pytest.mark.parametrize("size", [1, 2])
def test_what_would_save_or_load_one_ranks_part_is_refused(size):
    minipar.run(refused, world_size=size)


def optimizer_saved(world):
    fsdp = FSDP(network(), world, nn.Linear, per_element=True)
    optimizer = torch.optim.AdamW(fsdp.parameters())
    loss_of(fsdp, world.rank).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"this rank's part alone.*full_state_dict\(\)"):
        optimizer.state_dict()
    whole = torch.optim.AdamW(network().parameters())
    whole.step()
    assert whole.state_dict()


def test_the_state_of_an_optimizer_over_shards_is_refused():
    minipar.run(optimizer_saved, world_size=2)


def whole_states(world):
    model = part_frozen()
    fsdp = FSDP(model, world, nn.Linear)
    fsdp(samples(world.rank))
    with fsdp.summon_full_parameters():
        for use in (partial(fsdp, samples(0)), fsdp.full_state_dict, fsdp.summon_full_parameters().__enter__):
            with pytest.raises(RuntimeError, match="inside summon_full_parameters"):
                use()
        summoned = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict({name: x + 1 for name, x in summoned.items()})
    return summoned, fsdp.full_state_dict(), full_state_dict(model, world)


def test_inside_summon_full_parameters_states_are_whole():
    want = part_frozen().state_dict()
    for summoned, full, by_placement in minipar.run(whole_states, world_size=2):
        assert list(summoned) == list(full) == list(by_placement) == list(want)
        for name, x in want.items():
            assert torch.equal(summoned[name], x)
            assert torch.equal(full[name], x + 1)
            assert torch.equal(by_placement[name], x + 1)


def saved_by_torch(world, folder):
    model = network()
    fsdp = FSDP(model, world, nn.Linear)
    optimizer = torch.optim.AdamW(fsdp.parameters())
    loss_of(fsdp, world.rank).backward()
    optimizer.step()
    for use in (
        lambda: checkpoint.save({"model": model}, checkpoint_id=folder),
        lambda: save_model(model, f"{folder}/model.safetensors"),
        lambda: state_dict.get_model_state_dict(fsdp),
        lambda: state_dict.get_model_state_dict(
            fsdp, options=state_dict.StateDictOptions(full_state_dict=True)
        ),
        lambda: state_dict.get_state_dict(model, optimizer),
        lambda: state_dict.get_optimizer_state_dict(fsdp, optimizer),
        lambda: state_dict.set_model_state_dict(model, network().state_dict()),
    ):
        with pytest.raises(RuntimeError, match=r"this rank's part alone.*full_state_dict"):
            use()


def test_torchs_distributed_checkpoints_of_shards_are_refused(tmp_path):
    minipar.run(saved_by_torch, str(tmp_path), world_size=2)


def changed(world):
    """What is said of a module that was changed after it was wrapped, by each use."""
    said = []
    for change in (
        lambda m: m.float(),
        lambda m: m.append(nn.Linear(3, 2).double()),
        lambda m: setattr(m[2], "bias", nn.Parameter(torch.zeros(3).double())),
    ):
        model = network()
        fsdp = FSDP(model, world, nn.Linear)
        change(model)
        for use in (
            partial(fsdp, samples(0)),
            fsdp.full_state_dict,
            partial(fsdp.load_full_state_dict, network().state_dict()),
            fsdp.summon_full_parameters().__enter__,
        ):
            with pytest.raises(RuntimeError) as refusal:
                use()
            said.append(str(refusal.value))
    return said


def test_a_module_changed_after_wrapping_is_refused_by_name():
    for said in minipar.run(changed, world_size=2):
        assert all(s.startswith("the storage of 0.weight, in unit '0', was replaced") for s in said[:4])
        assert all(s.startswith("the parameter 3.weight was added or replaced") for s in said[4:8])
        assert all(s.startswith("the parameter 2.bias was added or replaced") for s in said[8:])
