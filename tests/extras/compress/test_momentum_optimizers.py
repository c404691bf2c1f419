"""1-bit Adam, 0/1 Adam and 1-bit LAMB against their papers' algorithms written out for all workers in one process."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.extras.compress import CompressedMean, OneBitAdam, OneBitLamb, Sign, TopK, ZeroOneAdam
from minipar.extras.compress.zero_one_adam import agrees_after, is_variance_step
from minipar.extras.optimizers.lamb import Lamb
from minipar.mesh import Placement, set_placement
from tests.extras.compress.test_compress import vector

WHOLE = partial(CompressedMean, codec=TopK(1.0))
STEPS, WARMUP, LR, EPS = 14, 5, 1e-2, 1e-8


def gradient(rank: int, step: int, name: int, shape) -> torch.Tensor:
    return vector(torch.Size(shape).numel(), 1000 * rank + 10 * step + name).view(shape) + 0.3


SHAPES = [(4, 6), (5,)]


def start() -> list[nn.Parameter]:
    return [nn.Parameter(vector(torch.Size(s).numel(), 77 + i).view(s)) for i, s in enumerate(SHAPES)]


def optimize(world, make, steps=STEPS):
    """The parameters after each step; bytes sent in each."""
    params = start()
    optimizer, after, sent = make(params, world), [], []
    for step in range(steps):
        world.traffic.reset()
        for i, p in enumerate(params):
            p.grad = gradient(world.rank, step, i, p.shape)
        optimizer.step()
        sent.append(world.traffic.sent_bytes)
        after.append([p.detach().clone() for p in params])
    return after, sent


def apart(ranks, want) -> float:
    """The largest difference of a rank's parameters from the transcription's, after any step in which ranks agree."""
    return max(
        (a - b).abs().max().item()
        for after, _ in ranks
        for got, wanted in zip(after, want)
        if wanted is not None
        for a, b in zip(got, wanted)
    )


# The papers' algorithms: 1-bit Adam with its signs and their errors, the others with a codec that loses nothing -----


def signs(x, error):
    """C(x + error), and what it lost."""
    wanted = x + error
    sent = wanted.abs().mean() * torch.where(wanted >= 0, 1.0, -1.0)
    return sent, wanted - sent


def one_bit_adam_of_the_paper(workers):
    """arXiv:2102.02888, algorithm 1, each chunk by a worker of its own; bias corrections that stop with the warm-up."""
    found, (b1, b2) = [], (0.9, 0.999)
    x = torch.cat([p.detach().flatten() for p in start()])
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    error = [[torch.zeros_like(c) for c in x.chunk(workers)] for _ in range(workers)]  # worker, chunk
    error_of_mean = [torch.zeros_like(c) for c in x.chunk(workers)]
    for t in range(STEPS):
        g = [
            torch.cat([gradient(w, t, i, s).flatten() for i, s in enumerate(SHAPES)]) for w in range(workers)
        ]
        if t < WARMUP:
            mean = sum(g) / workers
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean.square()
        else:
            own = [(b1 * m + (1 - b1) * g[w]).chunk(workers) for w in range(workers)]
            averaged = []
            for r in range(workers):
                sent = []
                for w in range(workers):
                    one, error[w][r] = signs(own[w][r], error[w][r])
                    sent.append(one)
                one, error_of_mean[r] = signs(sum(sent) / workers, error_of_mean[r])
                averaged.append(one)
            m = torch.cat(averaged)
        s = min(t + 1, WARMUP)
        x = x - LR * m / (1 - b1**s) / ((v / (1 - b2**s)).sqrt() + EPS)
        found.append([a.view(s) for a, s in zip(x.split([24, 5]), SHAPES)])
    return found


def zero_one_adam_of_the_paper(workers, every, patience, decay=0.0):
    """arXiv:2202.06009, algorithm 1, with AdamW's decay of both weights; None where the workers are apart."""
    found, (b1, b2) = [], (0.9, 0.999)
    x = [[p.detach().clone() for p in start()] for _ in range(workers)]
    m, u = ([[torch.zeros_like(p) for p in x[0]] for _ in range(workers)] for _ in range(2))
    v, last, gammas = [torch.zeros_like(p) for p in x[0]], [p.clone() for p in x[0]], 0.0
    for t in range(STEPS):
        g = [[gradient(w, t, i, s) for i, s in enumerate(SHAPES)] for w in range(workers)]
        for i in range(len(SHAPES)):
            if is_variance_step(t + 1, WARMUP, patience):
                v[i] = b2 * v[i] + (1 - b2) * (sum(g[w][i] for w in range(workers)) / workers).square()
            for w in range(workers):
                m[w][i] = b1 * m[w][i] + (1 - b1) * g[w][i]
                x[w][i] = x[w][i] * (1 - LR * decay) - LR * m[w][i] / (v[i].sqrt() + EPS)
                u[w][i] = u[w][i] + LR * m[w][i]
            last[i] = last[i] * (1 - LR * decay)
        gammas += LR
        agreed = agrees_after(t + 1, WARMUP, every)
        if agreed:
            for i in range(len(SHAPES)):
                mean = sum(u[w][i] for w in range(workers)) / workers
                last[i] = last[i] - mean / (v[i].sqrt() + EPS)
                for w in range(workers):
                    m[w][i], x[w][i], u[w][i] = mean / gammas, last[i], torch.zeros_like(mean)
            gammas = 0.0
        found.append([p.clone() for p in last] if agreed else None)
    return found


def one_bit_lamb_of_the_paper(workers, decay=0.0):
    """arXiv:2104.06069, algorithm 1, with bias corrections that stop at the end of the warm-up."""
    found, (b1, b2, b3), eps = [], (0.9, 0.999, 0.9), 1e-6
    x = [p.detach().clone() for p in start()]
    m, v, fresh = ([torch.zeros_like(p) for p in x] for _ in range(3))
    c_avg, r = [0.0, 0.0], [1.0, 1.0]
    for t in range(STEPS):
        for i, s in enumerate(SHAPES):
            g = sum(gradient(w, t, i, s) for w in range(workers)) / workers
            before, m[i] = m[i], b1 * m[i] + (1 - b1) * g
            n = min(t + 1, WARMUP)
            if t < WARMUP:
                v[i] = b2 * v[i] + (1 - b2) * g.square()
            adam = m[i] / (1 - b1**n) / ((v[i] / (1 - b2**n)).sqrt() + eps)
            step = adam + decay * x[i]
            if t < WARMUP:
                c = (x[i].norm() / step.norm()).item()
                c_avg[i] = b3 * c_avg[i] + (1 - b3) * min(max(c, 0.01), 10.0)
                fresh[i] = v[i].clone()
            else:
                g = (m[i] - b1 * before) / (1 - b1)
                fresh[i] = b2 * fresh[i] + (1 - b2) * g.square()
                new = ((v[i] / (1 - b2**n)).sqrt() + eps) / ((fresh[i] / (1 - b2**n)).sqrt() + eps)
                share = min(1.0, (adam.norm() / step.norm()).item()) if decay else 1.0
                new = min(max(share * new.max().item() + 1 - share, 0.5), 4.0)
                r[i] = min(max(new, 0.9 * r[i]), 1.1 * r[i])
                c = r[i] * c_avg[i]
            x[i] = x[i] - LR * c * step
        found.append([p.clone() for p in x])
    return found


def make_adam(params, world, cls=OneBitAdam):
    return cls(params, world, warmup=WARMUP, lr=LR)


def make_zero_one(params, world, cls=ZeroOneAdam, decay=0.0):
    return cls(params, world, warmup=WARMUP, every=3, patience=2, lr=LR, weight_decay=decay, compress=WHOLE)


def make_lamb(params, world, cls=OneBitLamb, decay=0.0):
    return cls(params, world, warmup=WARMUP, lr=LR, weight_decay=decay, compress=WHOLE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [2, 3])
def test_one_bit_adam_is_its_papers_algorithm(workers):
    ranks = minipar.run(optimize, make_adam, world_size=workers)
    assert apart(ranks, one_bit_adam_of_the_paper(workers)) < 1e-5


@pytest.mark.parametrize(("workers", "decay"), [(2, 0.0), (3, 0.0), (2, 5.0)])
def test_zero_one_adam_is_its_papers_algorithm(workers, decay):
    ranks = minipar.run(optimize, partial(make_zero_one, decay=decay), world_size=workers)
    want = zero_one_adam_of_the_paper(workers, 3, 2, decay)
    assert sum(w is None for w in want) >= 2, "some steps go alone"
    assert apart(ranks, want) < 1e-5


@pytest.mark.parametrize(("workers", "decay"), [(2, 0.0), (3, 0.0), (2, 5.0)])
def test_one_bit_lamb_is_its_papers_algorithm(workers, decay):
    ranks = minipar.run(optimize, partial(make_lamb, decay=decay), world_size=workers)
    assert apart(ranks, one_bit_lamb_of_the_paper(workers, decay)) < 1e-5


class ForgetsTheErrorOfTheMean(OneBitAdam):
    """Planted: only what a rank's own signs lost is fed back."""

    def _step(self, pairs, grads, warm):
        super()._step(pairs, grads, warm)
        for compressor in self.compressors.by_comm.values():
            compressor.server.clear()


class KeepsItsWeights(ZeroOneAdam):
    """Planted: at an agreement a rank takes the momentum, and stays where it is."""

    def _agree(self, group, param, u):
        own = param.clone()
        super()._agree(group, param, u)
        param.copy_(own)


class KeepsItsScale(OneBitLamb):
    """Planted: the scale stays that of the warm-up, whatever the variance does."""

    def _follow(self, group, param, before):
        self.state[param]["ratio"].fill_(0.5)
        return super()._follow(group, param, before)


FAULTS = [
    (ForgetsTheErrorOfTheMean, make_adam, one_bit_adam_of_the_paper),
    (KeepsItsWeights, make_zero_one, partial(zero_one_adam_of_the_paper, every=3, patience=2)),
    (KeepsItsScale, make_lamb, one_bit_lamb_of_the_paper),
]


@pytest.mark.parametrize(("fault", "make", "paper"), FAULTS)
def test_a_planted_fault_is_not_the_papers_algorithm(fault, make, paper):
    ranks = minipar.run(optimize, partial(make, cls=fault), world_size=2)
    assert apart(ranks, paper(2)) > 1e-4


# Warm-up, traffic, replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("onebit", "plain"), [(OneBitLamb, Lamb), (OneBitAdam, torch.optim.AdamW)])
def test_a_warm_up_is_the_plain_optimizer_bit_for_bit(onebit, plain):
    def both(world):
        ours, theirs = start(), start()
        mine = onebit(ours, world, warmup=9, lr=LR, weight_decay=0.1)
        other = plain(theirs, lr=LR, weight_decay=0.1)
        for step in range(9):
            grads = [gradient(world.rank, step, i, s) for i, s in enumerate(SHAPES)]
            whole = world.all_reduce(torch.cat([g.flatten() for g in grads]), "mean").split([24, 5])
            for p, q, g, mean in zip(ours, theirs, grads, whole):
                p.grad, q.grad = g, mean.view(q.shape)
            mine.step()
            other.step()
        return all(torch.equal(p, q) for p, q in zip(ours, theirs))

    assert minipar.run(both, world_size=2) == [True, True]


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 5))
def test_agreements_and_variance_steps_follow_their_policies(warmup, every, patience):
    steps = range(1, 200)
    agreed = [step for step in steps if agrees_after(step, warmup, every)]
    assert set(range(every, 200, every)) <= set(agreed), "a run may always end there"
    assert set(range(1, warmup + 1)) <= set(agreed)
    assert all(b - a <= every for a, b in zip(agreed, agreed[1:]))
    assert [step % every for step in agreed[-3:]] == [0, 0, 0]
    least = next((d for d in range(2, every + 1) if every % d == 0), 1)
    multiples = [step for step in range(warmup + 5, 200) if step % least == 0]
    assert agreed[warmup : warmup + 8] == [*range(warmup + 1, warmup + 5), *multiples[:4]], "HOLD is 4"
    varied = [step for step in steps if is_variance_step(step, 10**6, patience)]
    gaps = [b - a for a, b in zip([0, *varied], varied)]
    assert gaps == [2 ** (i // patience) for i in range(len(gaps))]
    assert not any(is_variance_step(step, warmup, patience) for step in range(warmup + 1, 200))


def test_one_bit_lambs_scales_stay_within_their_limits():
    def scales(world):
        """c_avg after the warm-up of one step, and r after each of 16 more, of a large and of a small layer."""
        params = [nn.Parameter(torch.full((4,), size)) for size in (100.0, 1e-4)]
        optimizer = OneBitLamb(params, world, warmup=1, betas=(0.0, 0.5, 0.9), compress=WHOLE)
        ratios = []
        for step in range(17):
            for p, later in zip(params, (1e-3, 1e3)):
                p.grad = torch.full((4,), later if step else 1.0)
            optimizer.step()
            ratios.append([optimizer.state[p]["ratio"].item() for p in params])
        return [optimizer.state[p]["c_avg"].item() for p in params], list(zip(*ratios))

    ((c_avg, (grows, shrinks)),) = minipar.run(scales, world_size=1)
    assert c_avg == pytest.approx([0.1 * 10, 0.1 * 0.01])
    assert grows == pytest.approx([min(4, 1.1**n) for n in range(17)])
    assert shrinks == pytest.approx([max(0.5, 0.9**n) for n in range(17)])


def test_zero_one_adam_sends_by_formula_and_nothing_when_local():
    p, n = 2, 29
    make = partial(ZeroOneAdam, warmup=3, every=4, patience=1, lr=LR)
    signs = 2 * (p - 1) * Sign().num_bytes(-(-n // p))
    for _, sent in minipar.run(optimize, lambda params, world: make(params, world), 20, world_size=p):
        for step, num_bytes in enumerate(sent, start=1):
            whole = 4 * n if is_variance_step(step, 3, 1) else 0  # 2(p-1)/p of n float32
            got = num_bytes - (signs if agrees_after(step, 3, 4) else 0)
            assert abs(got - whole) <= 4 * p, step


def test_weights_without_a_warm_up_gradient_never_move():
    def moved(world, make):
        """By parameter, whether its first row moved, and whether all others did."""
        params = start()
        optimizer, first = make(params, world), [p.detach().clone() for p in params]
        for step in range(STEPS):
            for i, p in enumerate(params):
                p.grad = gradient(world.rank, step, i, p.shape)
                p.grad[0] *= step >= WARMUP
            optimizer.step()
        return [((p != q)[0].any().item(), (p != q)[1:].all().item()) for p, q in zip(params, first)]

    for make in (make_adam, make_zero_one, make_lamb):
        assert minipar.run(moved, make, world_size=2) == [[(False, True)] * 2] * 2


MAKERS = {
    "onebit-adam": partial(OneBitAdam, warmup=20, lr=1e-2),
    "zero-one-adam": partial(ZeroOneAdam, warmup=20, every=5, lr=1e-2),
    "onebit-lamb": partial(OneBitLamb, warmup=20, lr=2e-2),
}


def test_a_gradient_that_is_not_finite_is_refused_by_name():
    def refused(world):
        param = nn.Parameter(torch.zeros(3))
        set_placement(param, Placement.whole("head.weight", (3,)))
        for make in MAKERS.values():
            param.grad = torch.tensor([0.0, float("nan"), 0.0])
            with pytest.raises(ArithmeticError, match="the gradient of head.weight is not finite"):
                make([param], world).step()

    minipar.run(refused, world_size=1)
