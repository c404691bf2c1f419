"""Half precision under fp32 master weights, and a loss scale on which all ranks agree."""

import pytest
import torch
from torch import nn

import minipar
from minipar.data_parallel import FSDP, DynamicLossScaler, ZeroOptimizer
from tests.strategies import assert_equal_to


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def by_zero_and_by_fsdp(world, dtype, steps):
    """Half precision parameters whose masters are in ZeRO, or in FSDP's shards: the same training, twice."""
    net = network().to(dtype)
    zero = ZeroOptimizer(net.parameters(), torch.optim.SGD, world, stage=2, algorithm="ring",
                         master_dtype=torch.float32, lr=0.1)  # fmt: skip
    start = network()
    with torch.no_grad():
        for p in start.parameters():
            p.copy_(p.to(dtype))  # the master copy of ZeRO is of rounded parameters
    fsdp = FSDP(start, world, nn.Linear, compute_dtype=dtype, algorithm="ring")
    sgd = torch.optim.SGD(fsdp.parameters(), lr=0.1)
    for step in range(steps):
        x = inputs(world.rank + 10 * step)
        zero.zero_grad()
        net(x.to(dtype)).square().mean().backward()
        assert all(s.grad.dtype == dtype for s in zero.shards)
        zero.step()
        sgd.zero_grad()
        fsdp(x).square().mean().backward()
        assert all(p.grad.dtype == torch.float32 for p in fsdp.parameters())
        sgd.step()
    masters = [state["master"] for state in zero.full_state_dict()["state"].values()]
    return masters, list(fsdp.full_state_dict().values())


def in_full_precision(dtype, size, steps):
    """Gradients in half precision, their mean and the step in fp32."""
    master = [p.detach().to(dtype).float() for p in network().parameters()]
    net = network().to(dtype)
    for step in range(steps):
        with torch.no_grad():
            for p, m in zip(net.parameters(), master):
                p.copy_(m)
        sums = [torch.zeros_like(m) for m in master]
        for rank in range(size):
            net.zero_grad()
            net(inputs(rank + 10 * step).to(dtype)).square().mean().backward()
            for s, p in zip(sums, net.parameters()):
                s += p.grad.float()
        for m, s in zip(master, sums):
            m -= 0.1 * s / size
    return master


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_and_fp32_reduces_and_steps(dtype):
    want = in_full_precision(dtype, 3, 3)
    for masters, fsdp in minipar.run(by_zero_and_by_fsdp, dtype, 3, world_size=3):
        for a, b, w in zip(masters, fsdp, want):
            assert_equal_to(b, w, rtol=1e-5)
            # ZeRO's reduced gradient is rounded to half precision before the step.
            assert_equal_to(a, w, rtol=0.1 * torch.finfo(dtype).eps)


def scaled(world, kind):
    """An overflow on the last rank alone, in the second step of four."""
    net = network()
    if kind == "zero":
        optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, world, stage=2, lr=0.1)
    elif kind == "fsdp":
        net = FSDP(net, world, nn.Linear)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = DynamicLossScaler(world, initial=1024.0, interval=2)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(inputs(0)).square().mean()
        if step == 1 and world.rank == world.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        seen.append((scaler.step(optimizer), scaler.current_scale))
    weights = net.full_state_dict() if kind == "fsdp" else net.state_dict()
    return seen, [w.clone() for w in weights.values()]


@pytest.mark.parametrize("kind", ["plain", "zero", "fsdp"])
def test_one_ranks_overflow_skips_all_and_the_scale_recovers(kind):
    net = network()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        net(inputs(0)).square().mean().backward()
        sgd.step()
    for seen, weights in minipar.run(scaled, kind, world_size=3):
        assert seen == [(True, 1024.0), (False, 512.0), (True, 512.0), (True, 1024.0)]
        for got, want in zip(weights, net.parameters()):
            assert_equal_to(got, want.detach(), rtol=1e-6)


def small_gradients(world, scale):
    """A gradient of 1e-9, through fp16, and the step it makes from 0."""
    net = nn.Linear(4, 1, bias=False).half()
    nn.init.zeros_(net.weight)
    optimizer = ZeroOptimizer(net.parameters(), torch.optim.SGD, world, master_dtype=torch.float32, lr=1.0)
    scaler = DynamicLossScaler(world, initial=scale)
    scaler.scale((net(torch.full((1, 4), 1e-3).half()).float() * 1e-6).sum()).backward()
    assert scaler.step(optimizer)
    return optimizer.full_state_dict()["state"][0]["master"]


def test_what_fp16_would_round_to_zero_arrives_when_it_is_scaled():
    for lost, kept in minipar.run(
        lambda world: (small_gradients(world, 1.0), small_gradients(world, 2.0**16)),
        world_size=2,
    ):
        assert torch.equal(lost, torch.zeros(1, 4))
        assert_equal_to(kept, torch.full((1, 4), -1e-9), rtol=1e-2)


@pytest.mark.parametrize("wrong", [dict(initial=0), dict(growth=1.0), dict(backoff=1.0), dict(interval=0)])
def test_a_scale_that_could_not_work_is_refused(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DynamicLossScaler(None, **wrong)


@pytest.mark.parametrize(("stepped", "scale"), [(True, 16.0), (False, 4.0)])
def test_a_scaler_goes_on_from_the_state_of_another(stepped, scale):
    """After two good steps of three, and one overflow of two."""
    saved, loaded = (DynamicLossScaler(None, initial, interval=3, hysteresis=2) for initial in (8.0, 1.0))
    for earlier in (False, True, True):
        saved.update(earlier)
    loaded.load_state_dict(saved.state_dict())
    loaded.update(stepped)
    assert loaded.current_scale == scale


def test_hysteresis_begins_anew_when_the_scale_has_grown():
    scaler, scales = DynamicLossScaler(None, initial=8.0, interval=2, hysteresis=2), []
    for stepped in (False, True, True, False, False, True, True):
        scaler.update(stepped)
        scales.append(scaler.current_scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
