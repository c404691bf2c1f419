"""What is used no more is let go of as soon as it is dropped, by reference counting alone: memory, files and threads."""

import copy
import gc
import os
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.comm.transport.shared_memory import REPEATED
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.pipeline import Pipeline
from minipar.schedules import make_schedule

FEW, MANY = 40, 200  # models, in quick runs and in all


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def with_ddp(world):
    ddp = DDP(model(), world)
    ddp(torch.ones(2, 64)).sum().backward()
    return [ddp, *ddp.parameters()]


def with_zero(world, offload=None):
    module = model()
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, world, offload=offload)
    for _ in range(2):
        module(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return [optimizer, module, *module.parameters()]


def with_fsdp(world, offload=None):
    fsdp = FSDP(model(), world, units=nn.Linear, offload=offload)
    fsdp(torch.ones(2, 64)).sum().backward()
    return [fsdp, fsdp.module, *fsdp.parameters()]


class Sum(nn.Module):
    """A unit with two inputs that need gradients, the second of them unused now and then."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(64, 64)

    def forward(self, x, y, both=True):
        return self.inside(x + y if both else x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), Sum()

    def forward(self, x, both=True):
        x = self.first(x)
        return self.second(x, x.tanh(), both)


def with_two_inputs(world):
    fsdp = FSDP(Twice(), world, units=(nn.Linear, Sum))
    for both in (True, False):
        fsdp(torch.ones(2, 64), both).sum().backward()
    return [fsdp, fsdp.module, *fsdp.parameters()]


def with_pipeline(world):
    stage = DDP(model(), world.subgroup([world.rank], "replicas"))
    pipeline = Pipeline([stage], world, make_schedule("zb-h1", 2, 4), nn.functional.mse_loss)
    pipeline.step(torch.ones(8, 64), torch.ones(8, 64))
    return [pipeline, stage, *stage.parameters()]


KINDS = {
    "ddp": with_ddp,
    "zero": with_zero,
    "zero on disk": partial(with_zero, offload="disk"),
    "fsdp": with_fsdp,
    "fsdp on disk": partial(with_fsdp, offload="disk"),
    "fsdp, two inputs": with_two_inputs,
    "pipeline": with_pipeline,
}


def in_a_cycle(world):
    model = FSDP(nn.Sequential(nn.Linear(4, 4)), world, nn.Linear)
    model.module.owner = [model]
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


def test_an_fsdp_that_its_module_refers_to_is_collected():
    assert minipar.run(in_a_cycle, world_size=2) == [True, True]


def without_collector(function):
    """Run the function while Python's garbage collector is off; return its result."""
    gc.collect()
    gc.disable()
    try:
        return function()
    finally:
        gc.enable()


def _dropped(world, make):
    make(world)  # what is imported at first use may keep frames for the collector
    return without_collector(lambda: [ref() is None for ref in list(map(weakref.ref, make(world)))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_dropped_is_freed_without_the_collector(kind):
    for freed in minipar.run(_dropped, KINDS[kind], world_size=2):
        assert all(freed)


def held():
    """Count what this process holds: threads, descriptors, mappings of files, and tensors."""
    for thread in threading.enumerate():
        if thread.name.startswith("offload"):
            thread.join(60)  # it ends when its memory is freed, a little later
    with open("/proc/self/maps") as maps:
        files = sum("minipar-offload-" in line or "(deleted)" in line for line in maps)
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    counts = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), files, tensors
    return dict(zip(["threads", "descriptors", "mappings", "tensors"], counts))


def grown(first, last):
    return {what: most for what, most in last.items() if most > first[what]}


def _made(world, make, number):
    """What this rank holds more of after `number` models than after ten. Less is well."""

    def made():
        for _ in range(REPEATED + 1):
            world.all_reduce(torch.ones(1))  # after so many messages the two ranks keep two links
        for _ in range(10):
            make(world)
        first = held()
        for _ in range(number - 10):
            make(world)
        # A thread that has ended may still be listed.
        deadline = time.monotonic() + 60
        while (more := grown(first, held())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return more

    return without_collector(made)


@pytest.mark.sampled(6)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_many_models_hold_what_the_first_ten_held(kind, request):
    number = FEW if request.config.option.quick else MANY
    assert minipar.run(_made, KINDS[kind], number, world_size=2) == [{}, {}]


def _backward_after_drop(world):
    module = nn.Linear(3, 1, bias=False)
    losses = []
    for wrap in (DDP, FSDP):
        wrapper = wrap(module if wrap is DDP else nn.Linear(3, 1, bias=False), world)
        params = list(wrapper.parameters())
        loss = wrapper(torch.full((1, 3), 1.0 + world.rank)).sum()
        del wrapper
        loss.backward()
        losses.append(torch.cat([p.grad.reshape(-1) for p in params]).as_subclass(torch.Tensor))
    return losses


def test_gradients_are_reduced_after_the_wrapper_is_dropped():
    ranks = minipar.run(_backward_after_drop, world_size=2)
    for ddp, _ in ranks:
        assert ddp.tolist() == [1.5] * 3
    assert torch.cat([fsdp for _, fsdp in ranks]).tolist() == [1.5] * 3


def _module_without_its_fsdp(world):
    module = model()
    FSDP(module, world)
    module(torch.ones(2, 64))


def test_a_module_whose_fsdp_was_dropped_refuses_in_words():
    with pytest.raises(minipar.RankError, match="unit 'root' was used after the FSDP around it was dropped"):
        minipar.run(_module_without_its_fsdp, world_size=2)


def _module_without_its_ddp(world):
    module = nn.Linear(3, 1, bias=False)
    DDP(module, world)
    module(torch.full((1, 3), 1.0 + world.rank)).sum().backward()
    return module.weight.grad.tolist()


def test_a_module_whose_ddp_was_dropped_has_gradients_of_its_own_rank():
    assert minipar.run(_module_without_its_ddp, world_size=2) == [[[1.0] * 3], [[2.0] * 3]]


def _gradients_of_two_inputs(world):
    """Gradients after two backwards through one graph, and after one in which an input gets no gradient."""
    torch.manual_seed(0)
    module = Twice().double()
    want = []
    for how in ("plain", "sharded"):
        model = module if how == "plain" else FSDP(copy.deepcopy(module), world, units=(nn.Linear, Sum))
        for both in (True, False):
            loss = model(torch.ones(2, 64, dtype=torch.float64), both).square().sum()
            loss.backward(retain_graph=both)
            if both:
                loss.backward()
        if how == "plain":
            want = [p.grad for p in module.parameters()]
            for p in module.parameters():
                p.grad = None
    return want, [p.grad.as_subclass(torch.Tensor) for p in model.parameters()]


def test_units_with_two_inputs_have_the_gradients_of_one_process():
    ranks = minipar.run(_gradients_of_two_inputs, world_size=2)
    for i, want in enumerate(ranks[0][0]):
        got = torch.cat([grads[i].flatten() for _, grads in ranks])
        torch.testing.assert_close(got, want.flatten(), rtol=1e-12, atol=1e-12)
