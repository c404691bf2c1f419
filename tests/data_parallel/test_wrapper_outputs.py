"""DDP and FSDP around modules with buffers, and with outputs that nobody sees."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP
from tests.data_parallel.wrapped import WRAPPERS, in_one_process, loss_of, network, samples
from tests.strategies import assert_equal_to

# Buffers -------------------------------------------------------------------------------------------------------------


def running_means(world, wrapper, broadcast_buffers):
    norm = nn.BatchNorm1d(6).double()
    wrapped = WRAPPERS[wrapper](norm, world, broadcast_buffers=broadcast_buffers)
    world.traffic.reset()
    for step in range(3):
        loss_of(wrapped, world.rank, step).backward()
    sent = world.traffic.by_kind.get("broadcast", 0)
    world.traffic.reset()
    with wrapped.no_sync():
        wrapped(samples(world.rank, 3))
    with torch.no_grad():
        wrapped(samples(world.rank, 4))
    assert "broadcast" not in world.traffic.by_kind
    return norm.running_mean, norm.num_batches_tracked, sent


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means_are_rank_0s_before_each_forward(wrapper, broadcast_buffers):
    results = minipar.run(running_means, wrapper, broadcast_buffers, world_size=3)
    for rank, (mean, count, _) in enumerate(results):
        norm = nn.BatchNorm1d(6).double()
        for step in range(2):
            norm(samples(0 if broadcast_buffers else rank, step))
        for step in range(2, 5):  # nothing is broadcast under no_sync, nor without gradients
            norm(samples(rank, step))
        assert_equal_to(mean, norm.running_mean, what=f"rank {rank}")
        assert count == 5
    num_bytes = 8 * (6 + 6 + 1)  # mean, variance, number of batches
    assert sum(sent for *_, sent in results) == broadcast_buffers * 3 * (3 - 1) * num_bytes


# Outputs --------------------------------------------------------------------------------------------------------------


class KeepsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.keeps = network(), True

    def forward(self, x):
        self.loss = self.inner(x).square().mean()
        return None if self.keeps else self.loss


def loss_in_an_attribute(world):
    fsdp = FSDP(KeepsItsLoss(), world)
    for _ in range(2):
        fsdp(samples(world.rank))
        with pytest.raises(
            RuntimeError, match=r"the backward reached inner\..*not through the output of its unit, 'root'"
        ):
            fsdp.module.loss.backward()
    fsdp.module.keeps = False
    fsdp(samples(world.rank)).backward()
    ddp = DDP(KeepsItsLoss(), world)
    ddp(samples(world.rank))
    ddp.module.loss.backward()
    return {name: p.grad for name, p in ddp.module.inner.named_parameters()}


def test_a_loss_in_an_attribute_is_refused_by_fsdp_not_by_ddp():
    for grads in minipar.run(loss_in_an_attribute, world_size=2):
        for name, want in in_one_process(network(), 2).items():
            assert_equal_to(grads[name], want, what=name)
