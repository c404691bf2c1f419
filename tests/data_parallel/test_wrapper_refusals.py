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
from tests.data_parallel.wrapped import WRAPPERS, in_one_process, loss_of, network, samples
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
    for copied, what in ((ddp, "DDP"), (fsdp, "FSDP"), (fsdp.module, "FSDP")):
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


def clipped(world):
    fsdp = FSDP(network(), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    loss_of(fsdp, world.rank).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for refused in (
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 0.01),
        lambda: nn.utils.clip_grad_norm_(fsdp.parameters(), 0.01, foreach=True),
        lambda: nn.utils.get_total_norm([p.grad for p in fsdp.parameters()]),
        lambda: next(fsdp.parameters()).grad.norm(),
        lambda: scaler.step(optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"minipar\.clip_grad_norm_\(shards, max_norm, comm\)"):
            refused()
    norm = minipar.clip_grad_norm_(fsdp.parameters(), 0.01, world)
    optimizer.step()
    return norm, fsdp.full_state_dict()


def test_torch_clipping_is_refused_and_ours_matches_one_process():
    model = network()
    in_one_process(model, 2)
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for norm, state in minipar.run(clipped, world_size=2):
        assert_equal_to(norm, want)
        for name, p in model.named_parameters():
            assert_equal_to(state[name], p.detach(), what=name)


def stepped_by_lamb(world):
    fsdp = FSDP(network(), world, nn.Linear)
    loss_of(fsdp, world.rank).backward()
    with pytest.raises(ValueError, match=r"of .* it holds \d+ elements; .*Lamb\(params, comm=comm\)"):
        Lamb(fsdp.parameters()).step()
    Lamb(fsdp.parameters(), comm=world).step()


def test_lamb_over_shards_asks_for_the_ranks_that_hold_the_others():
    minipar.run(stepped_by_lamb, world_size=2)


def cast_after_wrapping(world):
    said = []
    for make in (
        lambda m: DDP(m, world),
        lambda m: minipar.ZeroOptimizer(m.parameters(), torch.optim.Adam, world),
    ):
        model = network()
        wrapper = make(model)
        model.float()
        with pytest.raises(RuntimeError) as caught:
            (wrapper if isinstance(wrapper, DDP) else model)(samples(world.rank).float()).sum().backward()
        said.append(str(caught.value))
    return said


def test_a_model_that_was_cast_after_it_was_wrapped_is_refused():
    for said in minipar.run(cast_after_wrapping, world_size=2)[0]:
        assert (
            "was cast from torch.float64 to torch.float32 after it was wrapped; cast the model first" in said
        )


MODELS = {  # name -> (rank -> its model), and what is told
    "one layer more": (lambda r: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + r))), "2.weight in unit"),
    "transposed": (lambda r: nn.Linear(4, 6) if r else nn.Linear(6, 4), "weight in unit"),
    "another dtype": (
        lambda r: nn.Linear(4, 4).double() if r else nn.Linear(4, 4),
        "float64 trained on rank 1",
    ),
    "a frozen layer": (lambda r: nn.Linear(4, 4).requires_grad_(r == 0), "frozen on rank 1"),
    "another name": (lambda r: nn.ModuleDict({"ab"[r]: nn.Linear(4, 4)}), "a.weight in unit"),
    "another order": (
        lambda r: nn.ModuleDict({n: nn.Linear(4, 4) for n in ("ab", "ba")[r]}),
        "in their order",
    ),
    "no buffer": (lambda r: nn.BatchNorm1d(4, track_running_stats=r == 0), "buffer running_mean is"),
    "no values": (
        lambda r: nn.Linear(4, 4, device="meta" if r else "cpu"),
        "on_meta_device is False on rank 0",
    ),
}
OPTIONS = {  # name -> (rank -> its options), and what is told
    "units": (lambda r: dict(units=nn.Linear if r else None), "0.weight in unit 'root' is"),
    "reshard": (
        lambda r: dict(reshard_after_forward=r == 0),
        "reshard_after_forward is True on rank 0, and False",
    ),
    "compute_dtype": (lambda r: dict(compute_dtype=torch.bfloat16 if r else None), "compute_dtype is None"),
    "reduce": (lambda r: dict(reduce="sum" if r else "mean"), "reduce is mean on rank 0, and sum on rank 1"),
}


def told_of_differences(world):
    said = {}
    for name, (model_of, _) in MODELS.items():
        with pytest.raises(ValueError) as refusal:
            FSDP(model_of(world.rank), world)
        said[name] = str(refusal.value)
    for name, (options_of, _) in OPTIONS.items():
        with pytest.raises(ValueError) as refusal:
            FSDP(network(), world, **options_of(world.rank))
        said[name] = str(refusal.value)
    return said


def test_fsdp_tells_of_ranks_whose_models_or_options_differ():
    rank_0, rank_1 = minipar.run(told_of_differences, world_size=2)
    assert rank_0 == rank_1
    for name, (_, told) in (MODELS | OPTIONS).items():
        assert rank_0[name].startswith("the ranks' parameters or options differ: ")
        assert told in rank_0[name], rank_0[name]
