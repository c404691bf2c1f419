"""What DDP and FSDP refuse in words: old and second wrappers, layers, optimizers and clipping that cannot be right."""

import copy
import pickle

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP
from minipar.extras.optimizers import Lamb
from minipar.model.overrides import GradientSync
from tests.data_parallel.wrapped import WRAPPERS, in_one_process, loss_of, network
from tests.strategies import assert_equal_to


def refusals(world):
    model = network()
    ddp = DDP(model, world)
    again = DDP(model, world)
    loss_of(again, world.rank).backward()  # reduced once
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for use in (lambda: loss_of(ddp, world.rank), ddp.synchronize):
        with pytest.raises(RuntimeError, match="this DDP no longer reduces gradients: a later DDP"):
            use()
    with pytest.raises(RuntimeError, match="a later DDP was made"):
        loss_of(DDP(DDP(network(), world), world), world.rank)
    fsdp = FSDP(model, world, nn.Linear)
    with pytest.raises(RuntimeError, match="a later FSDP was made"):
        loss_of(again, world.rank)
    for wrapper, by in ((FSDP, "a second FSDP"), (DDP, "DDP")):
        with pytest.raises(ValueError, match=f"0.weight is a shard made by FSDP, and {by} needs whole"):
            wrapper(model, world)
    for copied, what in ((ddp, "DDP"), (fsdp, "FSDP")):
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{what} cannot be copied or pickled"):
                copying(copied)
    assert isinstance(ddp, GradientSync)
    assert isinstance(fsdp, GradientSync)
    assert not isinstance(model, GradientSync)
    return grads


def test_old_wrappers_second_wrappers_and_copies_are_refused():
    want = in_one_process(network(), 2)
    for grads in minipar.run(refusals, world_size=2):
        for name in want:
            assert_equal_to(grads[name], want[name], what=name)


def refused_layers(world):
    for old, name in ((nn.utils.weight_norm, "weight_norm"), (nn.utils.spectral_norm, "spectral_norm")):
        model = nn.Sequential(old(nn.Linear(6, 3)))
        with pytest.raises(
            ValueError, match=rf"torch\.nn\.utils\.{name} of unit '0' computes weight before.*parametri"
        ):
            FSDP(model, world, nn.Linear)
    for wrapper in WRAPPERS.values():
        sparse = wrapper(nn.Embedding(5, 2, sparse=True), world)
        with pytest.raises(
            RuntimeError, match=r"gradient of weight is sparse; use nn\.Embedding\(\.\.\., sparse=False\)"
        ):
            sparse(torch.tensor([1])).sum().backward()


def test_fsdp_refuses_unshardable_layers_and_sparse_gradients():
    minipar.run(refused_layers, world_size=2)


def norms(world):
    fsdp = FSDP(network(), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    loss_of(fsdp, world.rank).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for refused in (lambda: next(fsdp.parameters()).grad.norm(), lambda: scaler.step(optimizer)):
        with pytest.raises(RuntimeError, match=r"minipar\.clip_grad_norm_\(shards, max_norm, comm\)"):
            refused()


def test_a_shards_norm_and_torchs_scaler_are_refused():
    minipar.run(norms, world_size=2)


def stepped_by_lamb(world):
    fsdp = FSDP(network(), world, nn.Linear)
    loss_of(fsdp, world.rank).backward()
    with pytest.raises(ValueError, match=r"of .* it holds \d+ elements; .*Lamb\(params, comm=comm\)"):
        Lamb(fsdp.parameters()).step()
    Lamb(fsdp.parameters(), comm=world).step()


def test_lamb_over_shards_asks_for_the_ranks_that_hold_the_others():
    minipar.run(stepped_by_lamb, world_size=2)


class Signs(torch.optim.SGD):
    """A stranger's class, of which nothing is known."""


def stepped_by(world):
    """What the first step says of each optimizer over FSDP's shards, and of those that may step."""
    said = {}
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS, Signs):
        fsdp = FSDP(network(), world, nn.Linear)
        optimizer = cls(fsdp.parameters(), lr=0.1)
        before = [p.detach().clone() for p in fsdp.parameters()]
        with pytest.raises(ValueError) as refusal:
            optimizer.step(lambda: 0.0)
        said[cls.__name__] = str(refusal.value)
        assert all(torch.equal(p, b) for p, b in zip(fsdp.parameters(), before))
    trusted = FSDP(network(), world, nn.Linear, per_element=True)
    loss_of(trusted, world.rank).backward()
    Signs(trusted.parameters(), lr=0.1).step()
    whole = network()
    loss_of(whole, world.rank).backward()
    torch.optim.Adafactor(whole.parameters()).step()  # not FSDP's
    return said


def test_fsdp_refuses_optimizers_not_known_to_be_per_element():
    for said in minipar.run(stepped_by, world_size=2):
        for name, sentence in said.items():
            assert sentence.startswith(f"{name} is not known to update each element from that element alone")
            assert "per_element=True" in sentence
