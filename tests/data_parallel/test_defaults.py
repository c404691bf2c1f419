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


def bytes_of_a_step(world, wrapper, widths):
    """What a step sent, by kind, and the bytes of its flat buffers."""
    counts = []
    for width in widths:
        called = net = layers(width)
        if wrapper is DDP:
            called = DDP(net, world)
        elif wrapper is FSDP:
            called = FSDP(net, world, nn.Linear)
        zero = wrapper is ZeroOptimizer and ZeroOptimizer(net.parameters(), torch.optim.SGD, world, lr=0.1)
        world.traffic.reset()
        called(batch(world.rank, width).requires_grad_()).square().sum().backward()
        if zero:
            zero.step()
        if wrapper is FSDP:
            flat = sum(flat.full.nbytes for flat in called.flats)
        else:
            flat = sum(flat_bytes(b.params, world.size, len(b.flagged)) for b in (zero or called).buckets)
        counts.append((dict(world.traffic.by_kind), flat))
    return counts


# Wrapper -> kind -> how many times p-1/p of its flat buffers a step sends. FSDP gathers every unit twice: the one whose
# forward ends last is the root, which holds nothing. ZeRO and FSDP all-reduce the flags of unused parameters besides.
SENT = {
    DDP: {"all_reduce": 2},
    ZeroOptimizer: {"reduce_scatter": 1, "all_gather": 1},
    FSDP: {"reduce_scatter": 1, "all_gather": 2},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrapper", SENT)
def test_a_step_sends_the_wrappers_formula(wrapper, size):
    for counts in minipar.run(bytes_of_a_step, wrapper, WIDTHS, world_size=size):
        for sent, flat in counts:
            flags = 0 if wrapper is DDP else sent.pop("all_reduce")
            assert flags <= 2 * (size - 1) * 8
            assert sent == {kind: n * (size - 1) * flat // size for kind, n in SENT[wrapper].items()}


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
