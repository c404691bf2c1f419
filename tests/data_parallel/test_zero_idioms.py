"""ZeroOptimizer where a torch optimizer stands: the same program gives torch's numbers, or is refused in words."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.spec.memory import held_bytes, storages
from tests.strategies import assert_equal_to


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return model(x.to(next(model.parameters()).dtype)).square().mean()


# The idioms: programs of (make, model, backward). `make` makes an optimizer, `backward(model, step)` adds a step's
# gradient, and each returns the model that it has trained.


def plain_loop(make, model, backward, zero_grad=lambda model, optimizer: optimizer.zero_grad(), steps=3):
    optimizer = make(model.parameters())
    for step in range(steps):
        zero_grad(model, optimizer)
        backward(model, step)
        optimizer.step()
    return model


def model_zeroes(make, model, backward):
    return plain_loop(make, model, backward, lambda model, _: model.zero_grad())


def model_zeroes_in_place(make, model, backward):
    return plain_loop(make, model, backward, lambda model, _: model.zero_grad(set_to_none=False))


def half_the_model_zeroes(make, model, backward):
    return plain_loop(make, model, backward, lambda model, _: model[0].zero_grad())


def nothing_zeroes(make, model, backward):
    return plain_loop(make, model, backward, lambda model, _: None)


def one_gradient_is_dropped(make, model, backward):
    optimizer = make(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        if step == 1:
            model[2].weight.grad = None
        optimizer.step()
    return model


def steps_without_a_backward(make, model, backward):
    optimizer = make(model.parameters())
    backward(model, 0)
    optimizer.step()
    model.zero_grad()
    optimizer.step()
    return model


def a_group_is_added(make, model, backward):
    optimizer = make(model[0].parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
            model[2].zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def made_twice(make, model, backward):
    make(model.parameters())
    return plain_loop(make, plain_loop(make, model, backward), backward)


def thawed_before_zero_grad(make, model, backward):
    model[0].requires_grad_(False)
    optimizer = make(model.parameters())
    for step in range(3):
        model[0].requires_grad_(step > 0)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def thawed_before_the_backward(make, model, backward):
    model[0].requires_grad_(False)
    optimizer = make(model.parameters())
    for step in range(3):
        model.zero_grad()
        model[0].requires_grad_(step > 0)
        backward(model, step)
        optimizer.step()
    return model


def weights_are_loaded(make, model, backward):
    optimizer = make(model.parameters())
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    backward(model, 0)
    optimizer.step()
    return model


def resumed_under_a_schedule(make, model, backward):
    def begin(model):
        optimizer = make(model.parameters())
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    optimizer, schedule = begin(model)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
            model = network()
            optimizer, schedule = begin(model)
            for x, state in zip((model, optimizer, schedule), saved):
                x.load_state_dict(state)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        schedule.step()
    return model


IDIOMS = [
    model_zeroes,
    model_zeroes_in_place,
    half_the_model_zeroes,
    nothing_zeroes,
    one_gradient_is_dropped,
    steps_without_a_backward,
    a_group_is_added,
    made_twice,
    thawed_before_zero_grad,
    thawed_before_the_backward,
    weights_are_loaded,
    resumed_under_a_schedule,
]


class Counting(torch.optim.Optimizer):
    """Momentum as many published optimizers have it: an argument on self, a state made at once, a count in the group."""

    def __init__(self, params, lr, momentum=0.9, start=0.0):
        super().__init__(params, dict(lr=lr, count=0))
        self.momentum, self.start = momentum, start
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, start)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    own = self.state[p].setdefault("sum", torch.full_like(p, self.start))
                    own.mul_(self.momentum).add_(p.grad)
                    p.sub_(own, alpha=group["lr"] / group["count"])


OPTIMIZERS = [
    (Counting, dict(lr=0.1, momentum=0.5, start=0.2)),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    (torch.optim.AdamW, dict(lr=0.02, fused=True)),  # zero_grad(set_to_none=False) then zeroes all at once
]


def all_idioms(world, optimizer):
    cls, options = OPTIMIZERS[optimizer]
    trained = {}
    for stage in (1, 2):
        for idiom in IDIOMS:
            model = idiom(
                lambda params, stage=stage: ZeroOptimizer(
                    params, cls, world, stage, bucket_mb=1e-4, per_element=True, **options
                ),
                network(),
                lambda model, step: loss_of(model, world.rank, step).backward(),
            )
            trained[idiom.__name__, stage] = {n: p.detach() for n, p in model.named_parameters()}
    return trained


@pytest.mark.sampled(9)
@pytest.mark.parametrize("optimizer", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_programs_written_for_torchs_optimizer_give_its_numbers(optimizer, size):
    cls, options = OPTIMIZERS[optimizer]

    def backward(model, step):
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()

    results = minipar.run(all_idioms, optimizer, world_size=size)
    for idiom in IDIOMS:
        want = idiom(lambda params: cls(params, **options), network(), backward)
        for trained in results:
            for stage in (1, 2):
                for name, p in want.named_parameters():
                    got = trained[idiom.__name__, stage][name]
                    assert_equal_to(got, p.detach(), what=f"{idiom.__name__}, stage {stage}: {name}")


def counted(world):
    own = dict(lr=0.1, momentum=0.5, start=0.2, per_element=True, bucket_mb=1e-4)
    model = plain_loop(
        lambda params: ZeroOptimizer(params, Counting, world, offload="cpu", **own),
        network(),
        lambda model, step: loss_of(model, world.rank, step).backward(),
    )
    return {name: p.detach() for name, p in model.named_parameters()}


def test_an_optimizer_class_gets_every_argument_and_keeps_counts():
    cls, options = OPTIMIZERS[0]
    want = plain_loop(
        lambda params: cls(params, **options),
        network(),
        lambda model, step: (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward(),
    )
    for trained in minipar.run(counted, world_size=2):
        for name, p in want.named_parameters():
            assert_equal_to(trained[name], p.detach(), what=name)


# Master weights ----------------------------------------------------------------------------------------------------


def gradients_of_the_last_backward(world, earlier: bool):
    """With `earlier`, after two backwards, only the first of them reduced, and `zero_grad` in place."""
    zero = ZeroOptimizer((model := network()).parameters(), torch.optim.SGD, world, lr=0.1)
    if earlier:
        loss_of(model, world.rank, 0).backward()
        with zero.no_sync():
            loss_of(model, world.rank, 1).backward()
        model.zero_grad(set_to_none=False)
    loss_of(model, world.rank, 2).backward()
    return [shard.grad.tolist() for shard in zero.shards]


def test_zeroing_in_place_forgets_what_was_not_reduced_too():
    after_others, alone = (
        minipar.run(gradients_of_the_last_backward, earlier, world_size=2) for earlier in (True, False)
    )
    assert after_others == alone


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


# Steps inside no_sync ------------------------------------------------------------------------------------------------


def steps_in_one_no_sync(make, model, backward, no_sync):
    """The parameters after three steps inside one no_sync, one of two backwards, and one of a backward inside it."""
    optimizer = make(model.parameters())
    with no_sync(optimizer):
        for step in range(3):
            model.zero_grad()
            backward(model, step)
            if step == 1:
                backward(model, 10)
            optimizer.step()
        model.zero_grad()
        backward(model, 3)
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def all_steps_in_one_no_sync(world):
    def make(params, stage):
        return ZeroOptimizer(params, torch.optim.SGD, world, stage, bucket_mb=1e-4, lr=0.1, momentum=0.9)

    def backward(model, step):
        loss_of(model, world.rank, step).backward()

    return [
        steps_in_one_no_sync(partial(make, stage=stage), network(), backward, ZeroOptimizer.no_sync)
        for stage in (1, 2)
    ]


def test_every_step_inside_one_no_sync_uses_its_own_gradients():
    def backward(model, step):
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()

    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    want = steps_in_one_no_sync(make, network(), backward, nullcontext)
    for stages in minipar.run(all_steps_in_one_no_sync, world_size=2):
        for trained in stages:
            for got, p in zip(trained, want):
                assert_equal_to(got, p)


# Exceptions ----------------------------------------------------------------------------------------------------------


def disturbed_by_an_exception(world, stage, earlier, set_to_none):
    """The same backward before and after one that an exception ended. With `earlier`, that one had gradients to add to."""
    model = network()
    optimizer = ZeroOptimizer(
        model.parameters(), torch.optim.SGD, world, stage, bucket_mb=1e-6, first_bucket_mb=1e-6, lr=0.1
    )
    loss_of(model, world.rank, 0).backward()
    want = [shard.grad.clone() for shard in optimizer.shards]
    if not earlier:
        optimizer.zero_grad()
    hook = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, world.rank, 1).backward()
    hook.remove()
    optimizer.zero_grad(set_to_none)
    loss_of(model, world.rank, 0).backward()
    return all(torch.equal(shard.grad, x) for shard, x in zip(optimizer.shards, want))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_an_exception_in_a_backward_zero_grad_begins_anew(stage, set_to_none):
    for earlier in (False, True):
        equal = minipar.run(disturbed_by_an_exception, stage, earlier, set_to_none, world_size=2)
        assert equal == [True, True], earlier


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
    with pytest.raises(ValueError, match="load it with load_state_dict"):
        optimizer.load_full_state_dict(state)
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
