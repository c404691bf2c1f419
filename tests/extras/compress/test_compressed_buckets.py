"""What compressors are given of a flat buffer's gradients."""

from functools import partial

import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP
from minipar.extras.compress import CompressedBuckets, CompressedMean, Int8


def used_on_rank_0(world):
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    model.forward = lambda x: sum(layer(x) for layer in model[: 2 - world.rank])
    ddp = DDP(model, world, reduce_bucket=CompressedBuckets(partial(CompressedMean, codec=Int8())))
    ddp(torch.ones(1, 8)).sum().backward()
    return [None if p.grad is None else p.grad.count_nonzero().item() for p in model.parameters()]


def test_a_parameter_that_one_rank_used_has_its_mean_on_all():
    assert minipar.run(used_on_rank_0, world_size=2) == [[64, 8, 64, 8]] * 2
