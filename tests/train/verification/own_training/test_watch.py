"""What a watched training may do besides: odd optimizers, schedules that are only read, names without a value."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import minipar
from tests.train.verification.own_training.setups import (
    averaged,
    batch,
    flat_sharded,
    mlp,
    own_part,
    planned,
    train,
)


class Delegating:
    """An optimizer that has no method of its own."""

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1)

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


def flat(module, mesh):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def waits_beside_an_unset_name(world, mesh):
    model, optimizer, step = train(world, mesh, after=averaged, optimizer=planned)
    schedule = optimizer.plan
    if world is not None:
        group = world

    def step_and_wait(k):
        loss = step(k)
        if k == 100:
            print(group)
            schedule.step()
        return loss

    return model, optimizer, step_and_wait


def only_reads_its_schedule(world, mesh):
    model, optimizer, step = train(world, mesh, after=averaged, optimizer=planned)
    schedule = optimizer.plan

    def step_and_read(k):
        loss = step(k)
        assert schedule.get_last_lr()
        return loss

    return model, optimizer, step_and_read


def replaces_step(world, mesh):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda: [p.data.sub_(p.grad.sign(), alpha=0.1) for p in model.parameters()]

    def step(k):
        x, y = (x if world is None else own_part(x, mesh) for x in batch(k))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def returns_nan_on_a_rank(world, mesh):
    model, optimizer, step = train(world, mesh, after=averaged)

    def step_and_lose(k):
        loss = step(k)
        return loss if world is None else torch.nan if world.rank == 0 else None

    return model, optimizer, step_and_lose


def more_columns_than_rows(world, mesh):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(k):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters() if world is not None else ():
            p.grad = world.all_reduce(p.grad, "sum")
        optimizer.step()

    return model, optimizer, step


RIGHT = {
    "delegating": partial(train, after=averaged, optimizer=Delegating),
    "FSDP with flat parameters": partial(train, wrap=flat),
    "FSDP with the module's own": partial(train, wrap=flat_sharded),
    "waits": waits_beside_an_unset_name,
}
WRONG = {
    only_reads_its_schedule: "was never stepped in 3 steps",
    replaces_step: "keeps its own: nobody averages them",
    returns_nan_on_a_rank: "DIVERGES first in loss, step 0",
    more_columns_than_rows: "train on the same samples: 4 of 4",
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_called_right(name):
    assert str(minipar.verify_training(RIGHT[name], dp=2)).endswith("the numbers of one process")


@pytest.mark.parametrize("setup", WRONG, ids=lambda setup: setup.__name__)
def test_what_is_wrong_is_told_with_its_cause(setup):
    assert WRONG[setup] in str(minipar.verify_training(setup, dp=2))
