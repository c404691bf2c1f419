"""ZeroOptimizer where a torch optimizer stands: the same program gives torch's numbers, or is refused in words."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.spec.memory import held_bytes, storages
from tests.data_parallel.wrapped import loss_of, network

# Master weights ----------------------------------------------------------------------------------------------------


def clipped_under_no_sync(world, stage):
    model = network()
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world, stage, lr=1.0)
    said = []
    for before in (0, 1):  # and once after a reduced gradient, which the shards have
        for _ in range(before):
            loss_of(model, world.rank).backward()
        with optimizer.no_sync():
            loss_of(model, world.rank).backward()
        with pytest.raises(RuntimeError) as refusal:
            minipar.clip_grad_norm_(optimizer.shards, 0.1, world)
        said.append(str(refusal.value))
        optimizer.synchronize()
        norm = minipar.clip_grad_norm_(optimizer.shards, 0.1, world)
        clipped = minipar.clip_grad_norm_(optimizer.shards, 1e9, world)
        optimizer.zero_grad()
    return said, norm, clipped


@pytest.mark.parametrize("stage", [1, 2])
def test_shards_whose_gradients_are_not_reduced_are_not_clipped(stage):
    """They had a norm of 0, so the step took the whole gradient."""
    for said, norm, clipped in minipar.run(clipped_under_no_sync, stage, world_size=2):
        assert len(said) == 2
        assert all(re.search(r"gradient of \S+ is not reduced", each) for each in said), said
        assert norm > 0.1
        assert clipped == pytest.approx(0.1, rel=1e-4)


def mixed(world, model, lr=1e-2):
    return ZeroOptimizer(model.parameters(), torch.optim.AdamW, world, master_dtype=torch.float32, lr=lr)


def masters(optimizer):
    return [state["master"] for state in optimizer.full_state_dict()["state"].values()]


def train(optimizer, model, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def resumes_mixed(world, how):
    """Masters after four steps: without a stop, and with one after two steps."""
    model = network(torch.bfloat16)
    optimizer = mixed(world, model)
    train(optimizer, model, world.rank, range(2))
    optimizer_state = optimizer.state_dict() if how == "own" else optimizer.full_state_dict()
    saved = copy.deepcopy((model.state_dict(), optimizer_state))
    train(optimizer, model, world.rank, range(2, 4))

    other = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).bfloat16()
    resumed = mixed(world, other)
    other.load_state_dict(saved[0])
    (resumed.load_state_dict if how == "own" else resumed.load_full_state_dict)(saved[1])
    train(resumed, other, world.rank, range(2, 4))
    return masters(optimizer), masters(resumed)


@pytest.mark.parametrize("how", ["own", "full"])
def test_master_weights_are_saved_and_loaded_with_every_bit(how):
    for want, got in minipar.run(resumes_mixed, how, world_size=2):
        assert want[0].dtype == torch.float32
        assert not torch.equal(want[0], want[0].bfloat16().float())  # there is something to lose
        assert all(map(torch.equal, got, want))


def fill(model, value):
    model.load_state_dict({name: torch.full_like(x, value) for name, x in model.state_dict().items()})


def loads_weights(world):
    """Weights that were loaded, after a step with lr=0; and the masters of others, loaded since, before a step."""
    model = network(torch.bfloat16)
    optimizer = mixed(world, model, lr=0.0)
    before = masters(optimizer)
    train(optimizer, model, world.rank, range(1))
    assert all(map(torch.equal, masters(optimizer), before))  # those that were not loaded keep every bit
    fill(model, 7)
    train(optimizer, model, world.rank, range(1))
    after = [p.detach().float() for p in model.parameters()]
    fill(model, 8)
    return after, masters(optimizer)


def test_loaded_weights_replace_the_masters():
    for after, at_once in minipar.run(loads_weights, world_size=2):
        assert all(torch.equal(x, torch.full_like(x, 7)) for x in after)
        assert all(torch.equal(x, torch.full_like(x, 8)) for x in at_once)


# Refused in words ----------------------------------------------------------------------------------------------------


def refusals(world):
    model = network()

    def make(**options):
        return ZeroOptimizer(model.parameters(), torch.optim.Adam, world, lr=0.01, **options)

    earlier = make(bucket_mb=1e-4)
    optimizer = make()
    for use in (earlier.step, earlier.zero_grad, earlier.no_sync, earlier.synchronize):
        with pytest.raises(RuntimeError, match="a later ZeroOptimizer was made"):
            use()
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"parameter 0.*minipar\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="DynamicLossScaler"):
        scaler.step(optimizer)
    if world.size > 1:
        with pytest.raises(RuntimeError, match=r"minipar\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(optimizer.shards, 1.0)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a ZeroOptimizer cannot be copied or pickled"):
            copying(optimizer)
    optimizer.step()
    model[0].requires_grad_(False)
    late = make()
    late.zero_grad()
    model[0].requires_grad_(True)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 was thawed after zero_grad\(\)"):
        _ = late.shards
    ddp = DDP(model, world)
    with pytest.raises(RuntimeError, match="a later DDP was made"):
        late.step()
    make()
    with pytest.raises(RuntimeError, match="this DDP no longer reduces gradients: a later ZeroOptimizer"):
        ddp(torch.zeros(1, 6, dtype=torch.float64))
    fsdp = FSDP(network(), world, nn.Linear)
    with pytest.raises(ValueError, match=r"0\.weight is a shard made by FSDP, and ZeroOptimizer needs whole"):
        ZeroOptimizer(fsdp.parameters(), torch.optim.SGD, world)
    sparse = nn.Embedding(5, 2, sparse=True)
    kept = ZeroOptimizer(sparse.parameters(), torch.optim.SGD, world)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 is sparse; use nn\.Embedding"):
        sparse(torch.tensor([1])).sum().backward()
    del kept  # it reduces only as long as somebody has it


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_right_is_refused_in_words(size):
    minipar.run(refusals, world_size=size)


def states_that_do_not_fit(world):
    model = network()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, world, bucket_mb=1.0, lr=0.01)
    loss_of(model, world.rank, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    others = copy.deepcopy(state)
    for part in others["parts"].values():
        part["rank"] = 1 - part["rank"]
    more_ranks = copy.deepcopy(state)
    for part in more_ranks["parts"].values():
        part["size"] = 4
    small = ZeroOptimizer(network().parameters(), torch.optim.Adam, world, bucket_mb=1e-4)
    full = optimizer.full_state_dict()
    for wrong, said in (
        (state, "load it with load_state_dict"),
        ({**full, "param_groups": [{"params": [0]}]}, "groups of"),
        ({**full, "state": {3: {"exp_avg": torch.ones(2)}}}, r"exp_avg of parameter 3 has shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_full_state_dict(wrong)
    of_one = torch.optim.Adam(network().parameters()).state_dict()
    for wrong, said in (
        (others, f"rank {1 - world.rank} of 2, this rank's is .* of rank {world.rank} of 2"),
        (more_ranks, f"of rank {world.rank} of 4, this rank's is .* of 2; to change ranks"),
        (small.state_dict(), "part of parameter 0 is elements"),
        (of_one, "no 'parts': it is not from ZeroOptimizer"),
        ({"chunks": []}, "no 'parts'"),
        ({**state, "param_groups": []}, "groups of"),
        ({**state, "state": {9: {}}}, r"parameters \[9\]"),
        (
            {**state, "state": {0: {"exp_avg": torch.ones(1, 1)}}},
            r"exp_avg of parameter 0 has shape \(1, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(wrong)
    for number, values in before["state"].items():  # refused whole: nothing was loaded
        for key, value in values.items():
            assert torch.equal(optimizer.state_dict()["state"][number][key], value)
    assert state.keys() == {"state", "param_groups", "parts"}
    assert state["param_groups"][0].keys() == of_one["param_groups"][0].keys()


def test_a_mismatched_state_is_refused_and_changes_nothing():
    minipar.run(states_that_do_not_fit, world_size=2)


# Memory ------------------------------------------------------------------------------------------------------------


class KeepsFullGradients(ZeroOptimizer):
    """Stage 2 that frees no bucket before the end of the backward."""

    def _finish(self):
        for bucket in self.buckets:
            del bucket._free
        super()._finish()
        for bucket in self.buckets:
            bucket._free()
            bucket._free = lambda: None


def peak_of_a_backward(world, optimizer_cls):
    """Bytes that a backward adds at most, seen whenever a gradient is ready, in layers. A bucket per layer."""
    width, depth, held = 64, 12, []
    before = storages()
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    optimizer = optimizer_cls(
        model.parameters(), torch.optim.SGD, world, 2, bucket_mb=1e-3, algorithm="ring", lr=0.1
    )
    if optimizer_cls is KeepsFullGradients:
        for bucket in optimizer.buckets:
            bucket._free = lambda: None
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: held.append(held_bytes(before)))
    loss = model(torch.ones(1, width)).sum()
    at_first = held_bytes(before)
    loss.backward()
    return (max(held) - at_first) / (4 * width * width)


def peaks(world):
    return [peak_of_a_backward(world, cls) for cls in (ZeroOptimizer, KeepsFullGradients)]


def test_stage_2_holds_the_full_gradients_of_three_buckets_at_a_time():
    for right, wrong in minipar.run(peaks, world_size=4):
        assert right <= 3 + 12 / 4 + 1  # and the shards, and the gradient that autograd has just made
        assert wrong >= 12


# Two optimizers ------------------------------------------------------------------------------------------------------


class TwoParts(nn.Module):
    """Two layers for each of two optimizers; one of the first's is last, and some ranks do not use it."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)).double()
        self.second = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)).double()

    def forward(self, x, last: bool):
        y = self.first[0](self.second[1](self.second[0](x)))
        return (self.first[1](y) if last else y).sum()


def reduced_in_other_orders(world, wrap):
    """Rank 0 has all gradients of the first part before the second's; rank 1 has the second's first."""
    model = TwoParts()
    kept = [wrap(part, world) for part in (model.first, model.second)]
    model(torch.ones(1, 4).double(), world.rank == 0).backward()
    return len(kept)


def zero_of(part, world):
    return ZeroOptimizer(part.named_parameters(), torch.optim.SGD, world, lr=0.1)


@pytest.mark.parametrize("wrap", [zero_of, DDP])
def test_parts_that_ranks_reduce_in_different_orders_are_named(wrap):
    with pytest.raises(minipar.RankError, match="bucket [12], of 1.weight, .*bucket [12], of 1.weight, "):
        minipar.run(reduced_in_other_orders, wrap, world_size=2)


def state_after_a_change(world):
    """The rate and the step of a saved state, after those of the optimizers that have it have changed in place."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [ZeroOptimizer([w], torch.optim.Adam, world, lr=torch.tensor(0.5)) for w in weights]
    weights[0].sum().backward()
    optimizers[0].step()
    full = optimizers[0].full_state_dict()
    optimizers[1].load_full_state_dict(full)
    for weight, optimizer in zip(weights, optimizers):
        optimizer.param_groups[0]["lr"].fill_(0.25)
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    return full["param_groups"][0]["lr"].item(), full["state"][0]["step"].item()


def test_a_saved_state_does_not_change_with_the_optimizer():
    assert minipar.run(state_after_a_change, world_size=1) == [(0.5, 1.0)]


def bytes_after_an_exception(world):
    """Of full gradients that ZeRO-2 holds once a failed backward is zeroed."""
    model = network()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world, 2, lr=0.1, first_bucket_mb=1e-4)
    hook = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, world.rank).backward()
    hook.remove()
    optimizer.zero_grad()
    return sum(bucket.flat.untyped_storage().nbytes() for bucket in optimizer.buckets)


def test_full_gradients_of_a_backward_that_failed_are_freed():
    assert minipar.run(bytes_after_an_exception, world_size=2) == [0, 0]


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def counted(world):
    weight = nn.Parameter(torch.ones(4))
    optimizer = ZeroOptimizer([weight], Counting, world, lr=0.1, per_element=True)
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
    return optimizer.param_groups[0]["k"]


def test_what_an_optimizer_counts_in_its_groups_is_the_callers():
    assert minipar.run(counted, world_size=2) == [2, 2]
