"""Programs as people write them, under every wrapper: each gives the numbers that it gives in one process.

A program takes a `Use`, which makes its model and its optimizer and runs its backwards, and returns the trained model.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from tests.data_parallel.wrapped import loss_of, network, penalised, samples
from tests.strategies import assert_equal_to


class Use:
    """How a program trains: under a wrapper on this rank or, without a world, in one process with all ranks' samples."""

    def __init__(self, wrapper, optimizer, world=None, size=1):
        self.wrapper, self.world, self.ranks = wrapper, world, range(size) if world is None else [world.rank]
        self.cls, self.options = OPTIMIZERS[optimizer]
        self.is_fsdp = str(wrapper).startswith("fsdp")

    def model(self, model=None, units=nn.Linear):
        model = network() if model is None else model
        self.called = model
        if self.wrapper == "ddp":
            self.called = DDP(model, self.world, bucket_mb=1e-4)
        elif self.is_fsdp:
            kept = self.wrapper == "fsdp, kept"
            self.called = FSDP(model, self.world, units, reshard_after_forward=not kept, per_element=True)
        return model

    def optimizer(self, params):
        if not str(self.wrapper).startswith("zero"):
            return self.cls(params, **self.options)
        own = dict(
            bucket_mb=1e-4, per_element=True, offload="cpu" if self.wrapper == "zero1, offloaded" else None
        )
        return ZeroOptimizer(params, self.cls, self.world, int(self.wrapper[4]), **own, **self.options)

    def no_sync(self, optimizer):
        return self.owner(optimizer).no_sync() if self.world else nullcontext()

    def owner(self, optimizer):
        """Return what reduces the gradients."""
        return self.called if isinstance(self.called, DDP | FSDP) else optimizer

    def backward(self, step=0, loss=loss_of):
        """Add the gradients of a step's mean loss; under a wrapper, of this rank's loss."""
        for rank in self.ranks:
            (loss(self.called, rank, step) / len(self.ranks)).backward()

    def state(self, model):
        state = self.called.full_state_dict() if self.is_fsdp else model.state_dict()
        return {name: value.clone() for name, value in state.items()}


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


OPTIMIZERS = {
    "counting": (Counting, dict(lr=0.1, momentum=0.5, start=0.2)),
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "adamw": (
        torch.optim.AdamW,
        dict(lr=0.02, fused=True),
    ),  # zero_grad(set_to_none=False) then zeroes all at once
}


# Who zeroes, and when ------------------------------------------------------------------------------------------------


def plain_loop(use, zero_grad=lambda model, optimizer: optimizer.zero_grad(), model=None):
    model = use.model() if model is None else model
    optimizer = use.optimizer(model.parameters())
    for step in range(3):
        zero_grad(model, optimizer)
        use.backward(step)
        optimizer.step()
    return model


def model_zeroes(use):
    return plain_loop(use, lambda model, _: model.zero_grad())


def model_zeroes_in_place(use):
    return plain_loop(use, lambda model, _: model.zero_grad(set_to_none=False))


def half_the_model_zeroes(use):
    return plain_loop(use, lambda model, _: model[0].zero_grad())


def nothing_zeroes(use):
    return plain_loop(use, lambda model, _: None)


def one_gradient_is_dropped(use):
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        use.backward(step)
        if step == 1:
            model[2].weight.grad = None
        optimizer.step()
    return model


def steps_without_a_backward(use):
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    use.backward()
    optimizer.step()
    model.zero_grad()
    optimizer.step()
    return model


def unreduced_gradients_are_zeroed(use, set_to_none):
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    use.backward(0)
    with use.no_sync(optimizer):
        use.backward(1)
    use.called.zero_grad(set_to_none)
    use.backward(2)
    optimizer.step()
    return model


def accumulates(use, reduced, synchronises):
    """Three backwards of a step, each `reduced` or under no_sync; then `synchronize`, or ZeRO's step reduces the sum."""
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for microbatch in range(3):
            with nullcontext() if reduced else use.no_sync(optimizer):
                use.backward(3 * step + microbatch)
        if synchronises and use.world:
            use.owner(optimizer).synchronize()
        optimizer.step()
    return model


def steps_inside_one_no_sync(use):
    """Of the steps inside, one has two backwards; the last step, outside, has a backward inside."""
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    with use.no_sync(optimizer):
        for step in range(3):
            model.zero_grad()
            use.backward(step)
            if step == 1:
                use.backward(10)
            optimizer.step()
        model.zero_grad()
        use.backward(3)
    optimizer.step()
    return model


def an_exception_ends_a_backward(use, set_to_none, earlier=True, goes_on=True):
    """Where the first layer's backward fails, the last one's gradients are reduced, and the second's on their way.

    set_to_none  of zero_grad afterwards, None if nothing zeroes: then the failed backward leaves the earlier gradients
    earlier      whether the backward that fails had gradients to add to
    goes_on      whether another backward comes before the step
    """
    model = use.model(network().append(nn.Linear(3, 3).double()))
    optimizer = use.optimizer(model.parameters())
    use.backward(0)
    if not earlier:
        optimizer.zero_grad()
    if use.world:
        hook = model[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            use.backward(1)
        hook.remove()
    if set_to_none is not None:
        optimizer.zero_grad(set_to_none)
    if goes_on:
        use.backward(2)
    optimizer.step()
    return model


# What is trained -------------------------------------------------------------------------------------------------------


def a_group_is_added(use):
    model = use.model()
    optimizer = use.optimizer(model[0].parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.2})
            model[2].zero_grad()
        use.backward(step)
        optimizer.step()
    return model


def made_twice(use):
    model = use.model()
    use.optimizer(model.parameters())
    return plain_loop(use, model=plain_loop(use, model=model))


def thawed_before_zero_grad(use):
    model = network()
    model[0].requires_grad_(False)
    optimizer = use.optimizer(use.model(model).parameters())
    for step in range(3):
        model[0].requires_grad_(step > 0)
        optimizer.zero_grad()
        use.backward(step)
        optimizer.step()
    return model


def thawed_before_the_backward(use):
    model = network()
    model[0].requires_grad_(False)
    optimizer = use.optimizer(use.model(model).parameters())
    for step in range(3):
        model.zero_grad()
        model[0].requires_grad_(step > 0)
        use.backward(step)
        optimizer.step()
    return model


def frozen_for_a_while(use):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
    ).double()
    optimizer = use.optimizer(use.model(model, nn.Sequential).parameters())
    for step in range(3):
        model[:2].requires_grad_(step != 1)
        optimizer.zero_grad()
        use.backward(step)
        optimizer.step()
    return model


def weights_are_loaded(use):
    model = use.model()
    optimizer = use.optimizer(model.parameters())
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    use.backward()
    optimizer.step()
    return model


def resumed_under_a_schedule(use):
    def begin():
        model = use.model()
        optimizer = use.optimizer(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    model, optimizer, schedule = begin()
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
            model, optimizer, schedule = begin()
            for x, state in zip((model, optimizer, schedule), saved):
                x.load_state_dict(state)
        optimizer.zero_grad()
        use.backward(step)
        optimizer.step()
        schedule.step()
    return model


# What is computed ------------------------------------------------------------------------------------------------------


def stepped(use, model, units, loss=loss_of):
    use.model(model, units)
    optimizer = use.optimizer(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        use.backward(step, loss)
        optimizer.step()
    return model


def a_gradient_is_in_the_loss(use):
    return stepped(use, network(), nn.Linear, penalised)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return x * (self.scale * self.weight)  # saves the buffer for the backward


def two_forwards_save_a_buffer(use):
    def loss(called, rank, step):
        return (called(samples(rank, step)) + called(samples(rank, step + 1))).square().mean()

    return stepped(use, Scaled(), None, loss)


def outputs_are_changed_in_place(use):
    def loss(called, rank, step):
        logits = called(samples(rank, step))
        logits /= 2
        logits.masked_fill_(logits > 0.1, 0)
        return logits.square().mean()

    return stepped(use, network(), nn.Linear, loss)


@dataclass
class Out:
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    y: torch.Tensor


class Object:
    def __init__(self, y):
        self.y, self.parent = y, self  # a cycle, which the search must end


def half_seen(y):
    """Return a tensor that is seen at once and is not used, beside the object with the one that is."""
    return y * 0, Object(y)


class Hides(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = network(), how
        # It is needed in the backward of the first operation.
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return self.how(self.inner((x * x.new_ones(6).requires_grad_()) * self.scale))


class Outer(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.hides = Hides(how)

    def forward(self, x):
        out = self.hides(x)
        return (out[1] if isinstance(out, tuple) else out).y * 2


def outputs_are_objects(use, how, units):
    return stepped(use, Outer(how), units)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.net, self.use_reentrant = network(), use_reentrant

    def forward(self, x):
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=self.use_reentrant)


def recomputed(use, use_reentrant, units):
    return stepped(use, Recomputed(use_reentrant), units)


class Twice(nn.Module):
    """A unit called twice, the first time on data, and a parameter of the root that only some ranks use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.unit, self.scale = nn.Linear(6, 6).double(), nn.Parameter(torch.arange(6.0).double())

    def forward(self, x, scaled):
        y = self.unit(self.unit(x))
        return y * self.scale if scaled else 2 * y


def called_twice_and_used_on_some_ranks(use):
    def loss(called, rank, step):
        return called(samples(rank, step), rank == 0).square().mean()

    return stepped(use, Twice(), nn.Linear, loss)


class SharedNorm(nn.Module):
    """Three units with one norm, which is not called outside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.LayerNorm(6)
        self.units = nn.ModuleList(nn.Sequential(norm, nn.Linear(6, 6)) for _ in range(3)).double()

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


def units_share_a_module(use):
    return stepped(use, SharedNorm(), nn.Sequential)


FSDP_REFUSES = {
    thawed_before_zero_grad,
    thawed_before_the_backward,
    weights_are_loaded,
    resumed_under_a_schedule,
}
OF_OPTIMIZERS = {
    program.__name__: program
    for program in (
        model_zeroes, model_zeroes_in_place, half_the_model_zeroes, nothing_zeroes, one_gradient_is_dropped,
        steps_without_a_backward, a_group_is_added, made_twice, thawed_before_zero_grad, thawed_before_the_backward,
        weights_are_loaded, resumed_under_a_schedule,
    )
}  # fmt: skip
OF_MODELS = {
    program.__name__: program
    for program in (
        two_forwards_save_a_buffer, outputs_are_changed_in_place, called_twice_and_used_on_some_ranks, units_share_a_module,
        frozen_for_a_while,
    )
} | {
    "accumulates, all reduced": partial(accumulates, reduced=True, synchronises=False),
    "accumulates, synchronised": partial(accumulates, reduced=False, synchronises=True),
} | {
    f"unreduced, {to_none}": partial(unreduced_gradients_are_zeroed, set_to_none=to_none) for to_none in (True, False)
} | {
    f"an exception, {to_none}, {earlier}": partial(an_exception_ends_a_backward, set_to_none=to_none, earlier=earlier)
    for to_none in (True, False)
    for earlier in (True, False)
} | {
    f"{how.__name__} of {units}": partial(outputs_are_objects, how=how, units=units)
    for how in (Out, Slots, Object, half_seen)
    for units in (None, Hides, (Hides, nn.Linear))
} | {
    f"recomputed, {reentrant}, {units}": partial(recomputed, use_reentrant=reentrant, units=units)
    for reentrant in (True, False)
    for units in (None, nn.Linear)
}  # fmt: skip
# Wrapper -> programs of which each holds there alone.
OWN = {
    "ddp": {"penalty": a_gradient_is_in_the_loss},
    "zero": {
        "penalty": a_gradient_is_in_the_loss,
        "steps inside no_sync": steps_inside_one_no_sync,
        "accumulates, reduced by the step": partial(accumulates, reduced=False, synchronises=False),
    },
    "fsdp": {
        f"an exception, not zeroed, {goes_on}": partial(
            an_exception_ends_a_backward, set_to_none=None, goes_on=goes_on
        )
        for goes_on in (True, False)
    },
}
PROGRAMS = OF_OPTIMIZERS | OF_MODELS | OWN["zero"] | OWN["fsdp"]
WRAPPERS = ("ddp", "zero1", "zero2", "fsdp")


def trained_on_ranks(world, wrappers, optimizer, names):
    trained = {}
    for wrapper in wrappers:
        for name in names:
            if wrapper != "fsdp" or PROGRAMS[name] not in FSDP_REFUSES:
                use = Use(wrapper, optimizer, world)
                trained[wrapper, name] = use.state(PROGRAMS[name](use))
    return trained


def check(wrappers, optimizer, size, names):
    alone = {name: Use(None, optimizer, size=size) for name in names}
    want = {name: use.state(PROGRAMS[name](use)) for name, use in alone.items()}
    for trained in minipar.run(trained_on_ranks, wrappers, optimizer, list(names), world_size=size):
        for (wrapper, name), state in trained.items():
            for key, value in want[name].items():
                assert_equal_to(state[key], value, what=f"{name} under {wrapper}: {key}")


@pytest.mark.sampled(9)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 1, 3])
def test_programs_written_for_one_process_give_its_numbers(optimizer, size):
    more = ("zero1, offloaded",) if optimizer == "counting" else ()
    check((*WRAPPERS, *more), optimizer, size, OF_OPTIMIZERS)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp, kept"])
def test_models_written_for_one_process_give_its_numbers(wrapper):
    check((wrapper,), "sgd", 2, OF_MODELS | OWN[wrapper[:4]])
