"""What is used no more is let go of: its gradients, and the threads of its Comms."""

import gc
import weakref

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, ZeroOptimizer


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def with_ddp(world):
    return DDP(model(), world)


def with_zero(world):
    module = model()
    module.optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, world)
    return module


def _let_go(world, make):
    wrapper = make(world)
    wrapper(torch.ones(2, 3)).sum().backward()
    known = [weakref.ref(wrapper), *map(weakref.ref, wrapper.parameters())]
    del wrapper
    gc.collect()
    return [ref() is None for ref in known]


@pytest.mark.parametrize("make", [with_ddp, with_zero], ids=lambda make: make.__name__)
def test_a_model_that_is_dropped_is_freed(make):
    for freed in minipar.run(_let_go, make, world_size=2):
        assert all(freed)
