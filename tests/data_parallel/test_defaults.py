"""At the defaults, no algorithm named: DDP sends the bytes its docstring says, and ZeRO's sums are DDP's bit for bit."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.data_parallel.buckets import flat_bytes
from minipar.mesh import placement_of

SIZES = (2, 3, 4, 8)
WIDTHS = (1, 64, 128, 700)  # one row of a cache line, 16 KiB, 64 KiB and 1.9 MiB a layer


def layers(width: int) -> nn.Sequential:
    """A bucket of several layers, or a bucket a layer, and parameters that no rank count divides."""
    generator = torch.Generator().manual_seed(width)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    for param in net.parameters():
        param.data = torch.randn(param.shape, generator=generator) / width
    return net


def batch(rank: int, width: int) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(rank))


def bytes_of_a_backward(world, widths) -> list[tuple[int, int]]:
    """What a backward under DDP sent, and the flat bytes of its buckets."""
    counts = []
    for width in widths:
        ddp = DDP(layers(width), world)
        world.traffic.reset()
        ddp(batch(world.rank, width)).square().sum().backward()
        flats = [flat_bytes(b.params, world.size, len(b.flagged)) for b in ddp.buckets]
        counts.append((world.traffic.sent_bytes, sum(flats)))
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
def test_ddp_sends_its_formula(size):
    for counts in minipar.run(bytes_of_a_backward, WIDTHS, world_size=size):
        for sent, flat in counts:
            assert sent == 2 * (size - 1) * flat // size


def bytes_of_a_step(world, widths) -> list[tuple[int, int, int]]:
    """What a backward under ZeRO and its step sent, without the flags of unused parameters, and its buckets' bytes."""
    counts = []
    for width in widths:
        zero = ZeroOptimizer((net := layers(width)).parameters(), torch.optim.SGD, world, lr=0.1)
        world.traffic.reset()
        net(batch(world.rank, width)).square().sum().backward()
        zero.step()
        kinds = world.traffic.by_kind
        flats = [flat_bytes(b.params, world.size, len(b.flagged)) for b in zero.buckets]
        counts.append((kinds["reduce_scatter"], kinds["all_gather"], sum(flats)))
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
def test_zero_sends_its_formula(size):
    for counts in minipar.run(bytes_of_a_step, WIDTHS, world_size=size):
        for scattered, gathered, flat in counts:
            assert scattered == gathered == (size - 1) * flat // size


def bits(world, widths, stage, reduce, ddp_algorithm) -> list[bool]:
    """Whether the gradients and the parameters after two steps of SGD are DDP's, in every bit."""
    equal = []
    for width in widths:
        a, b, x = layers(width), layers(width), batch(world.rank, width)
        ddp = DDP(a, world, reduce=reduce, algorithm=ddp_algorithm)
        sgd = torch.optim.SGD(a.parameters(), lr=0.1)
        zero = ZeroOptimizer(b.parameters(), torch.optim.SGD, world, stage, reduce=reduce, lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            zero.zero_grad()
            ddp(x).square().mean().backward()
            b(x).square().mean().backward()
            for param, shard in zip(a.parameters(), zero.shards):
                low, high = placement_of(shard).flat
                equal.append(torch.equal(param.grad.reshape(-1)[low:high], shard.grad))
            sgd.step()
            zero.step()
        equal += [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters())]
    return equal


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("stage", "reduce"), [(1, "mean"), (2, "sum")])
def test_zeros_sums_are_ddps_bit_for_bit(size, stage, reduce):
    found = minipar.run(bits, WIDTHS, stage, reduce, "auto", world_size=size)
    assert all(map(all, found))


def test_an_all_reduce_that_adds_in_another_order_is_noticed():
    assert not all(map(all, minipar.run(bits, WIDTHS, 1, "mean", "tree", world_size=4)))


def bytes_of_an_fsdp_step(world, width) -> tuple[int, int, int]:
    fsdp = FSDP(layers(width), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    x = batch(world.rank, width).requires_grad_()
    world.traffic.reset()
    fsdp(x).square().sum().backward()
    optimizer.step()
    kinds = world.traffic.by_kind
    return kinds["all_gather"], kinds["reduce_scatter"], sum(flat.full.numel() for flat in fsdp.flats)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [1, 128])
def test_fsdp_sends_its_formula(size, width):
    """Every unit is gathered twice: the one whose forward ends last is the root, which holds nothing."""
    for gathered, scattered, elems in minipar.run(bytes_of_an_fsdp_step, width, world_size=size):
        assert scattered == (size - 1) * elems * 4 // size
        assert gathered == 2 * scattered
