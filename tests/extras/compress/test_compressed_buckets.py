"""Compressors in DDP and ZeRO, of some layers alone, and their states."""

from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, ZeroOptimizer
from minipar.extras.compress import (
    CompressedBuckets,
    CompressedMean,
    Int8,
    PlainMean,
    PowerSGD,
    Selective,
    Sign,
    TopK,
    own_gradients,
)
from tests.extras.compress.test_compress import loss_of, net, vector


def resumed(world, make):
    """Whether a compressor that goes on from the state of another one gives the bits of one that never stopped."""
    tensors = [
        {"a": vector(24, i + 9 * world.rank).view(4, 6), "b": vector(5, 50 + i + world.rank)}
        for i in range(4)
    ]
    whole, first, second = make(world), make(world), make(world)
    want = [whole.means(x) for x in tensors]
    for x in tensors[:2]:
        first.means(x)
    second.load(first.state())
    got = [second.means(x) for x in tensors[2:]]
    return all(torch.equal(a[key], b[key]) for a, b in zip(got, want[2:]) for key in a)


@pytest.mark.parametrize(
    "make",
    [
        partial(CompressedMean, codec=Sign(8)),
        partial(PowerSGD, rank=1),
        partial(Selective, compress=partial(CompressedMean, codec=TopK(0.2)), select=lambda key: key == "a"),
    ],
)
def test_a_compressor_goes_on_from_its_state(make):
    assert all(minipar.run(resumed, make, world_size=4))


def test_several_tensors_share_their_messages():
    def count(world):
        tensors = {i: vector(30 + i, i + world.rank).view(-1, 1 + i % 2) for i in range(0, 12, 2)}
        matrices = {i: vector(60, i + world.rank).view(6, 10) for i in range(5)}
        found = []
        for compressor, keys in (
            (CompressedMean(world, Sign()), tensors),
            (PowerSGD(world, 1), matrices),
            (PlainMean(world), tensors),
        ):
            world.traffic.reset()
            compressor.means(keys)
            many = world.traffic.messages
            world.traffic.reset()
            compressor.means({"one": next(iter(keys.values()))})
            found.append((many, world.traffic.messages))
        return found

    for rank in minipar.run(count, world_size=2):
        assert all(many == one for many, one in rank)


def test_tensors_that_are_not_chosen_are_exact():
    def selective(world):
        mean = Selective(world, partial(CompressedMean, codec=Sign()), lambda key: key == "big")
        tensors = {"small": vector(7, world.rank), "big": vector(99, 5 + world.rank)}
        got = mean.means(tensors)
        return got, {key: world.all_reduce(x, "mean") for key, x in tensors.items()}

    for got, want in minipar.run(selective, world_size=2):
        assert list(got) == ["small", "big"]
        assert torch.equal(got["small"], want["small"])
        assert not torch.equal(got["big"], want["big"])


# In DDP and ZeRO-1 ----------------------------------------------------------------------------------------------


def trained(world, compress, zero):
    model = net()
    adam = dict(lr=1e-2)
    buckets = None if compress is None else CompressedBuckets(compress)
    if zero:
        wrapped = model
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.Adam, world, zero, bucket_mb=0.0002, reduce_bucket=buckets, **adam
        )
    else:
        wrapped = DDP(model, world, bucket_mb=0.0002, first_bucket_mb=0.0002, reduce_bucket=buckets)
        optimizer = torch.optim.Adam(model.parameters(), **adam)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(wrapped, world.rank, step).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("compress", [partial(CompressedMean, codec=Sign()), partial(PowerSGD, rank=1)])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_have_the_bits_of_ddp(compress, stage):
    ddp = minipar.run(trained, compress, 0, world_size=2)
    zero = minipar.run(trained, compress, stage, world_size=2)
    plain = minipar.run(trained, None, 0, world_size=2)
    assert all(torch.equal(a, b) for x, y in zip(ddp, zero) for a, b in zip(x, y))
    assert not all(torch.equal(a, b) for a, b in zip(ddp[0], plain[0]))


@pytest.mark.parametrize(("reduce", "times"), [("mean", 1), ("sum", 2)])
def test_ddp_with_own_gradients_sends_nothing(reduce, times):
    """They stand for the mean: where gradients are summed over two ranks, each is taken twice."""

    def local(world):
        ddp = DDP(net(), world, reduce=reduce, reduce_bucket=own_gradients)
        world.traffic.reset()
        loss_of(ddp, world.rank, 0).backward()
        alone = net()
        loss_of(alone, world.rank, 0).backward()
        pairs = zip(ddp.module.parameters(), alone.parameters())
        return world.traffic.sent_bytes, all(torch.equal(p.grad, times * q.grad) for p, q in pairs)

    assert minipar.run(local, world_size=2) == [(0, True)] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_with_own_gradients_steps_by_each_ranks_own(stage):
    def local(world):
        model, alone = net(), net()
        sgd = ZeroOptimizer(
            model.parameters(), torch.optim.SGD, world, stage, lr=0.1, reduce_bucket=own_gradients
        )
        loss_of(model, world.rank, 0).backward()
        sgd.step()
        loss_of(alone, world.rank, 0).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        flat = [torch.cat([p.detach().view(-1) for p in x.parameters()]) for x in (model, alone, net())]
        return [x.tolist() for x in flat]

    (got, first, start), (same, second, _) = minipar.run(local, world_size=2)
    assert got == same
    assert all(x in (a, b) for x, a, b in zip(got, first, second))  # each element by the rank that has it
    assert got not in (first, second, start)


def test_a_gradient_of_one_rank_that_is_not_finite_stops_ddp():
    def broken(world):
        buckets = CompressedBuckets(partial(CompressedMean, codec=Sign()))
        ddp = DDP(nn.Linear(4, 4), world, reduce_bucket=buckets)
        x = torch.full((2, 4), float("inf") if world.rank else 1.0)
        ddp(x).sum().backward()

    with pytest.raises(minipar.RankError, match="is not finite: it is not compressed"):
        minipar.run(broken, world_size=2)


def used_on_rank_0(world):
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    model.forward = lambda x: sum(layer(x) for layer in model[: 2 - world.rank])
    ddp = DDP(model, world, reduce_bucket=CompressedBuckets(partial(CompressedMean, codec=Int8())))
    ddp(torch.ones(1, 8)).sum().backward()
    return [None if p.grad is None else p.grad.count_nonzero().item() for p in model.parameters()]


def test_a_parameter_that_one_rank_used_has_its_mean_on_all():
    assert minipar.run(used_on_rank_0, world_size=2) == [[64, 8, 64, 8]] * 2
