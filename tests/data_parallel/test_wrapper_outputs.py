"""DDP and FSDP around modules with buffers, and with outputs that are hidden, kept, or changed in place."""

from dataclasses import dataclass
from types import SimpleNamespace

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


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("scale", torch.full((6,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return x * (self.scale * self.weight)  # saves the buffer for the backward


def two_forwards(world, wrapper):
    wrapped = WRAPPERS[wrapper](Scaled(), world)
    (wrapped(samples(world.rank)) + wrapped(samples(world.rank, 1))).sum().backward()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    return wrapped.full_state_dict() if wrapper == "FSDP" else wrapped.module.state_dict()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_buffer_that_does_not_change_may_be_saved_for_a_backward(wrapper):
    of_ranks = [(samples(rank) + samples(rank, 1)).sum(0) * 2.0 for rank in range(2)]
    for state in minipar.run(two_forwards, wrapper, world_size=2):
        assert_equal_to(state["weight"], 1.0 - sum(of_ranks) / 2)


# Outputs --------------------------------------------------------------------------------------------------------------


@dataclass
class Out:
    y: torch.Tensor


@dataclass(slots=True)
class Slots:
    y: torch.Tensor


class Hides(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = network(), how
        self.scale = nn.Parameter(
            torch.ones(6, dtype=torch.float64)
        )  # needed in the backward of the first operation

    def forward(self, x):
        return self.how(self.inner((x * x.new_ones(6).requires_grad_()) * self.scale))


class Outer(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.hides = Hides(how)

    def forward(self, x):
        return self.hides(x).y * 2


def hidden_outputs(world, wrapper):
    grads = []
    for how in (Out, Slots):
        for units in (None, Hides, (Hides, nn.Linear)) if wrapper == "FSDP" else (None,):
            options = {"units": units} if wrapper == "FSDP" else {}
            wrapped = WRAPPERS[wrapper](Outer(how), world, **options)
            for _ in range(2):
                wrapped.zero_grad()
                loss_of(wrapped, world.rank).backward()
            with torch.no_grad():
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
                optimizer.step()
            full = wrapped.full_state_dict() if wrapper == "FSDP" else wrapped.module.state_dict()
            grads.append((how, units, full))
    return grads


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_outputs_may_be_in_dataclasses(wrapper):
    model = Outer(Out)
    grads = in_one_process(model, 2)
    for results in minipar.run(hidden_outputs, wrapper, world_size=2):
        for how, units, state in results:
            for name, p in model.named_parameters():
                assert_equal_to(state[name], p.detach() - grads[name], what=f"{how}, {units}: {name}")


class KeepsItsLoss(nn.Module):
    """Its output is an object that nobody knows, which has the loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        self.loss = self.inner(x).square().mean()
        return SimpleNamespace(loss=self.loss)


def loss_in_an_attribute(world):
    fsdp = FSDP(KeepsItsLoss(), world)
    for _ in range(2):
        fsdp(samples(world.rank))
        with pytest.raises(
            RuntimeError, match=r"the backward reached inner\..*not through the output of its unit, 'root'"
        ):
            fsdp.module.loss.backward()
    ddp = DDP(KeepsItsLoss(), world)
    ddp(samples(world.rank))
    ddp.module.loss.backward()
    return {name: p.grad for name, p in ddp.module.inner.named_parameters()}


def test_a_loss_in_an_attribute_is_refused_by_fsdp_not_by_ddp():
    for grads in minipar.run(loss_in_an_attribute, world_size=2):
        for name, want in in_one_process(network(), 2).items():
            assert_equal_to(grads[name], want, what=name)


def changed_in_place(world, wrapper):
    model = network()
    wrapped = WRAPPERS[wrapper](model, world)
    logits = wrapped(samples(world.rank))
    logits /= 2
    logits.masked_fill_(logits > 0.1, 0)
    logits.square().mean().backward()
    if wrapper == "FSDP":
        torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
        return {
            name: p - x
            for (name, p), x in zip(network().named_parameters(), wrapped.full_state_dict().values())
        }
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_outputs_may_be_changed_in_place(wrapper):
    model = network()
    for rank in range(2):
        logits = model(samples(rank)) / 2
        (logits.masked_fill(logits > 0.1, 0).square().mean() / 2).backward()
    for grads in minipar.run(changed_in_place, wrapper, world_size=2):
        for name, p in model.named_parameters():
            assert_equal_to(grads[name], p.grad, what=name)
