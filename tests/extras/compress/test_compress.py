"""Cheap messages: what is sent plus what is left is the sum of all gradients; bytes by formula; equal bits on all ranks."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.data_parallel import FSDP
from minipar.extras.compress import (
    CODECS,
    CompressedBuckets,
    CompressedMean,
    DiLoCo,
    Float8,
    Int8,
    OneBitAdam,
    PowerSGD,
    Sign,
    TopK,
)
from minipar.simple import power_sgd, sign_compression
from minipar.support.chunks import chunk_sizes
from tests.examples import examples


def vector(n: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


# Codecs ------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 700), st.integers(0, 99))
def test_a_codec_has_the_bytes_of_its_formula_and_is_contractive(name, n, seed):
    codec, x = CODECS[name], vector(n, seed, 10.0 ** (seed % 9 - 4))
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8
    assert len(payload) == codec.num_bytes(n)
    got = codec.decode(payload, n)
    assert got.shape == x.shape
    assert (x - got).square().sum() <= x.square().sum() * (1 + 1e-6)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(n)), n), torch.zeros(n))


def test_codecs_keep_what_they_say():
    x = vector(1000, 0)
    sign = Sign().decode(Sign().encode(x), 1000)
    assert torch.equal(sign.sign(), x.sign())
    assert sign.abs().unique().tolist() == pytest.approx([x.abs().mean().item()])
    assert (Int8().decode(Int8().encode(x), 1000) - x).abs().max() <= x.abs().max() / 254 * 1.0001
    for kind, bits in (("e4m3", 4), ("e5m2", 3)):
        y = Float8(kind).decode(Float8(kind).encode(x), 1000)
        normal = x.abs() > x.abs().max() / 1000
        assert ((y - x).abs() / x.abs())[normal].max() <= 2.0**-bits * 1.01
    top = TopK(0.1).decode(TopK(0.1).encode(x), 1000)
    kept = x.abs().topk(100).indices
    assert torch.equal(top[kept], x[kept])
    assert top.count_nonzero() == 100
    assert torch.equal(TopK(1.0).decode(TopK(1.0).encode(x), 1000), x)
    blocks = Sign(block=64).decode(Sign(block=64).encode(x), 1000).split(64)  # the last one has 40
    assert torch.allclose(
        torch.stack([b.abs().mean() for b in blocks]), torch.stack([b.abs().mean() for b in x.split(64)])
    )


@given(st.integers(2, 99), st.floats(0.1, 3), st.integers(0, 9))
def test_the_best_scale_of_signs_is_the_mean_and_not_the_norm(n, other, seed):
    def lost(x, scale):
        return (x - scale * torch.where(x >= 0, 1.0, -1.0)).square().sum().item()

    x = vector(n, seed)
    size, best = x.square().sum().item(), (x - Sign().decode(Sign().encode(x), n)).square().sum().item()
    assert best <= lost(x, other * x.abs().mean()) + 1e-4 * size
    length = size**0.5
    formula = 2 * size * (1 - x.abs().sum().item() / (n**0.5 * length))
    assert lost(x, length / n**0.5) == pytest.approx(formula, rel=1e-3, abs=1e-4 * size)
    one = torch.eye(1, 16)[0]
    assert lost(one, 0.25) == 1.5 > one.square().sum()


# The mean over ranks -----------------------------------------------------------------------------------------------


def phase_bytes(codec, sizes: list[int], rank: int) -> tuple[int, int]:
    """Bytes that a rank sends of chunks of these sizes: to the rank of each, and by a ring of what every rank encoded."""
    num_bytes = [codec.num_bytes(n) if n else 0 for n in sizes]
    return sum(num_bytes) - num_bytes[rank], sum(num_bytes) - num_bytes[(rank + 1) % len(sizes)]


def means(world, name, n, steps):
    mean = CompressedMean(world.using("ring"), CODECS[name])
    mean.comm.traffic.reset()
    out = [mean(vector(n, 10 * step + world.rank)) for step in range(steps)]
    return out, mean.comm.traffic.sent_bytes, mean.worker, mean.server


@examples(6)
@given(st.sampled_from(sorted(CODECS)), st.integers(1, 4), st.integers(1, 300))
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(name, size, n):
    steps, sizes = 3, chunk_sizes(n, size)
    ranks = minipar.run(means, name, n, steps, world_size=size)
    for rank, (out, sent, *_) in enumerate(ranks):
        assert all(torch.equal(a, b) for a, b in zip(out, ranks[0][0]))
        assert sent == steps * sum(phase_bytes(CODECS[name], sizes, rank))
    true = sum(vector(n, 10 * step + rank) for step in range(steps) for rank in range(size)) / size
    left = torch.cat([server.get((0,), torch.zeros(k)) for k, (*_, server) in zip(sizes, ranks)])
    for *_, worker, _ in ranks:
        left += worker.get(0, torch.zeros(n)) / size
    assert (sum(ranks[0][0]) + left - true).abs().max() < 1e-4


def test_a_mean_that_overflows_is_told_and_not_encoded():
    def refused(world):
        with pytest.raises(ArithmeticError, match="a mean of gradients is not finite"):
            CompressedMean(world, Sign())(torch.full((8,), 3e38))

    minipar.run(refused, world_size=2)


def test_tensors_without_elements_are_left_as_they_are():
    def averaged(world):
        found = []
        for mean in (CompressedMean(world, TopK(1.0)), PowerSGD(world)):
            several = {"a": torch.ones(3), "empty": torch.zeros(0), "b": torch.ones(2, 2)}
            found += [*mean.means(several).values(), *mean.means({"empty": torch.zeros(0)}).values()]
            assert mean.state().keys() <= {"a", "b"}
        return [x.numel() for x in found]

    assert minipar.run(averaged, world_size=2) == [[3, 0, 4, 0] * 2] * 2


def test_nan_and_inf_are_never_encoded():
    def refused(world, value):
        mean = CompressedMean(world, Sign())
        x = vector(20, world.rank)
        mean(x)
        kept = {k: v.clone() for k, v in mean.worker.items()}
        with pytest.raises(ArithmeticError, match="not finite"):
            mean(torch.full((20,), value))
        with pytest.raises(ArithmeticError, match="not finite"):
            PowerSGD(world)(torch.full((9, 9), value))
        return all(torch.equal(v, kept[k]) for k, v in mean.worker.items())

    for value in (float("nan"), float("inf")):
        assert minipar.run(refused, value, world_size=2) == [True, True]


# PowerSGD ------------------------------------------------------------------------------------------------------------


def by_power(world, rank, shape, steps):
    reducer, plain = PowerSGD(world, rank), torch.zeros(shape)
    world = world.using("ring")
    reducer.comm = world
    world.traffic.reset()
    sent = torch.zeros(shape)
    for step in range(steps):
        x = vector(torch.Size(shape).numel(), 7 * step + world.rank).view(shape)
        sent += reducer(x)
        plain += x
    left = reducer.residuals.get(0, torch.zeros(shape).view(shape[0], -1)).view(shape)
    traffic = world.traffic.sent_bytes
    return sent, world.all_reduce(plain, "mean"), world.all_reduce(left, "mean"), traffic


@examples(4)
@given(st.integers(1, 3), st.sampled_from([(16, 24), (8, 4, 6), (40, 8)]), st.sampled_from([1, 2, 4]))
def test_power_sgd_loses_nothing_and_sends_two_thin_matrices(rank, shape, size):
    ranks = minipar.run(by_power, rank, shape, 4, world_size=size)
    n, m = shape[0], torch.Size(shape[1:]).numel()
    elements = min(n * m, rank * (n + m))
    for sent, total, left, traffic in ranks:
        assert torch.equal(sent, ranks[0][0])
        assert (sent + left - total).abs().max() < 1e-4
        if size in (2, 4) and elements % size == 0:
            assert traffic <= 4 * 2 * (size - 1) / size * 4 * elements + 4 * 8 * size
            assert traffic >= 4 * 2 * (size - 1) / size * 4 * elements * 0.95


def test_power_sgd_of_full_rank_and_of_vectors_is_the_mean():
    def full(world):
        matrix, bias = vector(60, world.rank).view(6, 10), vector(6, world.rank)
        reducer = PowerSGD(world, 6)
        return (
            reducer(matrix, 0),
            world.all_reduce(matrix, "mean"),
            reducer(bias, 1),
            world.all_reduce(bias, "mean"),
        )

    for a, b, c, d in minipar.run(full, world_size=3):
        assert torch.equal(a, b)
        assert torch.equal(c, d)


def test_power_sgd_needs_a_rank():
    with pytest.raises(ValueError, match="rank=0"):
        PowerSGD(None, rank=0)


def test_power_sgd_finds_a_mean_of_low_rank():
    def low(world):
        common = torch.outer(vector(20, 100), vector(30, 101))
        reducer = PowerSGD(world, 1)
        got = [reducer(common) for _ in range(3)][-1]
        return (got - common).abs().max().item()

    assert max(minipar.run(low, world_size=2)) < 1e-4


# The ground floor's ------------------------------------------------------------------------------------------------


def simple_and_library(world):
    simple, ours = sign_compression.SignMean(world), CompressedMean(world, Sign())
    power, library = power_sgd.PowerSGD(world, 2), PowerSGD(world, 2)
    same = []
    for step in range(3):
        x = vector(16 * world.size, 5 * step + world.rank)
        same.append(torch.equal(simple(x), ours(x)))
        matrix = vector(120, 50 + 5 * step + world.rank).view(10, 12)
        same.append(torch.equal(power(matrix), library(matrix)))
    return all(same)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_ground_floors_versions_are_the_librarys(size):
    assert all(minipar.run(simple_and_library, world_size=size))


# Optimizers --------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def loss_of(model, rank: int, step: int) -> torch.Tensor:
    x = vector(48, 1000 * rank + step).view(8, 6)
    return (model(x) - x[:, :2] * 2).square().mean()


def test_one_bit_adam_needs_a_warm_up():
    with pytest.raises(ValueError, match="warmup=0; use at least 1"):
        OneBitAdam(net().parameters(), None, warmup=0)


def local(world, every, outer_lr, momentum, steps):
    model, plain = net(), net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, sgd = (
        DiLoCo(inner, world, every, outer_lr, momentum),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    world.traffic.reset()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
    sent = world.traffic.sent_bytes
    for step in range(steps):
        sgd.zero_grad()
        loss_of(plain, world.rank, step).backward()
        for p in plain.parameters():
            p.grad = world.all_reduce(p.grad, "mean")
        sgd.step()
    pair = [[p.detach() for p in m.parameters()] for m in (model, plain)]
    return pair, sent


def test_agreeing_after_every_step_is_data_parallelism():
    for (ours, plain), *_ in minipar.run(local, 1, 1.0, 0.0, 6, world_size=3):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain))


def test_agreeing_rarely_sends_little_and_ends_on_equal_replicas():
    often = minipar.run(local, 1, 1.0, 0.0, 12, world_size=2)
    rarely = minipar.run(local, 6, 0.7, 0.9, 12, world_size=2)
    assert rarely[0][1] * 6 == often[0][1]
    assert all(torch.equal(a, b) for a, b in zip(rarely[0][0][0], rarely[1][0][0]))
    with pytest.raises(ValueError, match="every=0"):
        DiLoCo(torch.optim.SGD(net().parameters(), lr=0.1), None, every=0)


def synchronise(world, warmup):
    """DiLoCo's weights after two outer steps, and those of torch's SGD on the same outer gradients; SGD inside."""
    (w,), (outer,) = ([nn.Parameter(vector(9, 1))] for _ in range(2))
    diloco = DiLoCo(torch.optim.SGD([w], lr=0.1), world, every=2, warmup=warmup)
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4 + warmup):
        w.grad = vector(9, 10 * step + world.rank)
        diloco.step()
        if step < warmup:
            outer.data.copy_(w)
        elif step % 2:
            walked = 0.1 * (vector(9, 10 * step + world.rank) + vector(9, 10 * step - 10 + world.rank))
            outer.grad = world.all_reduce(walked, "mean")
            nesterov.step()
    return w.detach(), outer.detach()


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_outer_step_is_torchs_nesterov_after_any_warm_up(warmup):
    for got, want in minipar.run(synchronise, warmup, world_size=2):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


# In DDP -----------------------------------------------------------------------------------------------------------


def by_ddp(world, compress, reduce, steps):
    model = net()
    buckets = None if compress is None else CompressedBuckets(compress)
    ddp = minipar.DDP(
        model, world, bucket_mb=0.0002, first_bucket_mb=0.0002, reduce=reduce, reduce_bucket=buckets
    )
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1 if reduce == "mean" else 0.1 / world.size)
    for step in range(steps):
        sgd.zero_grad()
        loss_of(ddp, world.rank, step).backward()
        sgd.step()
    return [p.detach() for p in model.parameters()], buckets and len(buckets.by_comm)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_ddp_with_a_codec_that_loses_nothing_is_ddp(reduce):
    plain = minipar.run(by_ddp, None, reduce, 4, world_size=3)
    for compress in (partial(CompressedMean, codec=TopK(1.0)), partial(PowerSGD, rank=16)):
        for (params, used), (want, _) in zip(minipar.run(by_ddp, compress, reduce, 4, world_size=3), plain):
            assert used == 1
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(params, want))


def test_fsdp_refuses_second_reductions_and_averages_whole_gradients():
    def whole(world):
        with pytest.raises(
            ValueError, match="reduce_bucket replaces one reduction, and replicas add a second"
        ):
            FSDP(net(), world, replicas=world, reduce_bucket=CompressedBuckets(partial(PowerSGD, rank=1)))
        grads = []
        for make in (partial(PowerSGD, rank=16), partial(CompressedMean, codec=TopK(1.0)), None):
            model = FSDP(net(), world, reduce_bucket=make and CompressedBuckets(make))
            loss_of(model, world.rank, 0).backward()
            grads.append([p.grad for p in model.parameters()])
        sizes = [[x.untyped_storage().nbytes() for x in own] for own in grads]
        assert sizes[0] == sizes[1] == sizes[2], "the gradients keep a whole unit's memory"
        return grads

    for *compressed, plain in minipar.run(whole, world_size=2):
        for grads in compressed:
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(grads, plain))
