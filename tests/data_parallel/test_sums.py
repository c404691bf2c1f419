"""Gradients of several backwards add up in a wider dtype than a half-precision model's."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import DDP, FSDP, ZeroOptimizer
from minipar.mesh.shard_gradient import ShardGradient
from minipar.model.deferrable_linear import Linear, WeightGradients, defer_weight_gradients

HALF, WIDE = torch.bfloat16, torch.float32
GRADIENTS = 256.0, 1.0, 1.0, 1.0  # 259; one after the other in bf16: 256


def ddp(model, world):
    wrapped = DDP(model, world, reduce_dtype=WIDE)
    return wrapped, wrapped, lambda: [p.grad for p in model.parameters()]


def zero(model, world, stage):
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world, stage, lr=1.0, master_dtype=WIDE)
    return model, optimizer, lambda: [shard.grad for shard in optimizer.shards]


def fsdp(model, world, reduce_dtype):
    wrapped = FSDP(model.float(), world, compute_dtype=HALF, reduce_dtype=reduce_dtype)
    return wrapped, wrapped, lambda: [p.grad for p in wrapped.parameters()]


# Wrapper -> (function that wraps, the sum's value there). DDP's gradients have the dtype of the parameters at the end.
WRAPPERS = {
    "DDP": (ddp, 260.0),
    "ZeRO-1": (partial(zero, stage=1), 259.0),
    "ZeRO-2": (partial(zero, stage=2), 259.0),
    "FSDP": (partial(fsdp, reduce_dtype=WIDE), 259.0),
    "FSDP, bf16 sent": (partial(fsdp, reduce_dtype=HALF), 260.0),
}


def sums(world, when):
    """The first element of the gradient after the four backwards, on a rank that has it, and after a fifth alone."""
    found = {}
    for name, (wrap, _) in WRAPPERS.items():
        model = nn.Linear(8, 1, bias=False, dtype=HALF)
        forward, owner, grads = wrap(model, world)
        for i, x in enumerate(GRADIENTS):
            quiet = (
                when == "all quiet"
                or when == "last synchronised"
                and i < 3
                or when == "in turns"
                and i % 2 == 0
            )
            with owner.no_sync() if quiet else nullcontext():
                forward(torch.full((1, 8), x, dtype=HALF)).sum().backward()
        if when == "all quiet":
            owner.synchronize()
        total = [float(g.flatten()[0]) for g in grads() if g is not None and g.numel()]
        owner.zero_grad()
        forward(torch.full((1, 8), 3.0, dtype=HALF)).sum().backward()
        alone = [float(g.flatten()[0]) for g in grads() if g is not None and g.numel()]
        found[name] = total, alone
    return found


@pytest.mark.parametrize("when", ["last synchronised", "every one synchronised", "in turns", "all quiet"])
def test_gradients_of_half_precision_add_up_in_float32(when):
    by_rank = minipar.run(sums, when, world_size=2)
    for name, (_, want) in WRAPPERS.items():
        if (
            name == "FSDP, bf16 sent"
        ):  # 257 is rounded when it is sent; what was reduced adds up in the shards
            want = {"every one synchronised": 259.0, "in turns": 258.0}.get(when, want)
        totals, alone = zip(*(found[name] for found in by_rank))
        assert {x for total in totals for x in total} == {want}, name
        assert {x for own in alone for x in own} == {3.0}, name


def sums_after_an_exception(world):
    """Of two layers, the second of which has its gradient first: their gradients in a backward after one that failed."""
    found = {}
    for name, (wrap, _) in WRAPPERS.items():
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=HALF) for _ in range(2)))
        nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
        forward, owner, grads = wrap(model, world)
        with owner.no_sync():
            forward(torch.ones(1, 8, dtype=HALF)).sum().backward()
        handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(torch.ones(1, 8, dtype=HALF)).sum().backward()
        handle.remove()
        owner.zero_grad()
        forward(torch.ones(1, 8, dtype=HALF)).sum().backward()
        found[name] = {float(x) for g in grads() if g is not None for x in g.flatten()}
    return found


def test_sums_of_a_backward_that_failed_are_in_no_later_one():
    assert all(
        own in ({8.0}, set())
        for found in minipar.run(sums_after_an_exception, world_size=2)
        for own in found.values()
    )


def deferred_sum(world):
    model = nn.Sequential(Linear(8, 1, dtype=HALF))
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world, lr=1.0, master_dtype=WIDE)
    queue = WeightGradients()
    defer_weight_gradients(model, queue)
    with optimizer.no_sync():
        for x in GRADIENTS:
            model(torch.full((1, 8), x, dtype=HALF, requires_grad=True)).sum().backward()
            queue.run()
    optimizer.synchronize()
    return [float(s.grad[0]) for s in optimizer.shards if s.grad.numel()]


def test_deferred_gradients_add_up_in_float32_too():
    assert minipar.run(deferred_sum, world_size=1) == [[259.0]]


def reduced_backwards_of_half_precision_shards(world):
    net = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    fsdp = FSDP(net, world, reduce_dtype=torch.float32, reduce="sum")
    found = []
    for xs in ((256, 1, 1, 1), (4,)):
        for x in xs:
            fsdp(torch.full((1, 4), x / world.size, dtype=torch.bfloat16)).sum().backward()
        assert all(isinstance(p.grad, ShardGradient) for p in fsdp.parameters() if p.grad is not None)
        found += [p.grad.float().unique().tolist() for p in fsdp.parameters() if p.numel()]
        fsdp.zero_grad(set_to_none=False)
    return found


def test_reduced_backwards_of_fsdp_add_up_in_reduce_dtype():
    for found in minipar.run(reduced_backwards_of_half_precision_shards, world_size=2):
        assert found in ([], [[260.0], [4.0]])  # 259, as rounded
