"""Muon orthogonalizes; ZeRO with whole parameters trains as one process does, as evenly and with the bytes it promises."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import minipar
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.data_parallel import ZeroOptimizer
from minipar.extras.optimizers.muon import Muon, newton_schulz, newton_schulz_flops
from minipar.extras.optimizers.whole_parameters import (
    WholeParameterBucket,
    WholeParameterZero,
    assign,
    update_flops,
)
from minipar.support.errors import RankError
from minipar.train.verification.verify import table, verify
from tests.examples import examples
from tests.strategies import seeds

# The update -------------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 12), st.integers(1, 12), st.floats(1e-6, 1e6), st.integers(1, 3))
def test_all_singular_values_come_near_1_and_singular_vectors_stay(seed, m, n, scale, batch):
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(batch, k, min(m, n), generator=generator).double())[0] for k in (m, n)
    )
    values = torch.logspace(-2.3, 0, min(m, n), dtype=torch.float64)  # of the norm, at least 2e-3
    matrices = scale * u @ torch.diag(values) @ v.mT
    got = u.mT @ newton_schulz(matrices) @ v
    found = got.diagonal(dim1=-2, dim2=-1)
    assert found.min() > 0.68
    assert found.max() < 1.21
    torch.testing.assert_close(got, torch.diag_embed(found), rtol=0, atol=1e-10)
    torch.testing.assert_close(newton_schulz(matrices[0]), newton_schulz(matrices)[0], rtol=0, atol=1e-10)


@given(seeds, st.integers(2, 9), st.integers(2, 9))
@examples(10)
def test_its_steps_are_those_of_torchs_muon_and_adamw(seed, m, n):
    """torch orthogonalizes in bfloat16, so a step differs by its rounding; vectors get AdamW's step exactly."""
    torch.manual_seed(seed)
    matrix, vector = torch.randn(m, n), torch.randn(n)
    ours, theirs = ([nn.Parameter(x.clone()) for x in (matrix, vector)] for _ in range(2))
    options = dict(lr=0.01, weight_decay=0.1)
    optimizers = [
        Muon([{"params": ours[:1]}, {"params": ours[1:], "rule": "adamw"}], **options),
        torch.optim.Muon(theirs[:1], adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(theirs[1:], betas=(0.9, 0.95), **options),
    ]
    for _ in range(3):
        for a, b in zip(ours, theirs):
            b.grad = torch.randn_like(b)
            a.grad = b.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    apart = (ours[0] - theirs[0]).norm() / (theirs[0] - matrix).norm()
    assert apart < 0.05
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-7)


def test_its_flops_are_those_of_its_products():
    with FlopCounterMode(display=False) as counted:
        newton_schulz(torch.randn(5, 3))
    assert newton_schulz_flops((3, 5)) == newton_schulz_flops((5, 3)) == counted.get_total_flops()
    assert newton_schulz_flops((4, 3, 5)) == 4 * newton_schulz_flops((3, 5))


# Whole parameters, evenly ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 4))
def test_no_ranks_share_is_far_above_the_best_possible(costs, p):
    def largest(ranks):
        return max(sum(c for c, r in zip(costs, ranks) if r == rank) for rank in range(p))

    got = largest(assign(costs, p))
    best = min(largest(ranks) for ranks in product(range(p), repeat=len(costs)))
    assert got <= (4 / 3 - 1 / (3 * p)) * best + 1e-9
    assert got <= sum(costs) / p + max(costs)


class Shampoo(torch.optim.Optimizer):
    """w = w - lr L^(-1/4) g R^(-1/4), with L and R the sums of g g^T and g^T g. Source: arXiv:1802.09568, algorithm 1."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                g, state = p.grad.reshape(len(p), -1), self.state[p]
                if not state:
                    state["L"], state["R"] = (1e-3 * torch.eye(k, dtype=p.dtype) for k in g.shape)
                state["L"] += g @ g.mT
                state["R"] += g.mT @ g
                p.sub_((_root(state["L"]) @ g @ _root(state["R"])).view_as(p), alpha=group["lr"])


def _root(a):
    values, vectors = torch.linalg.eigh(a)
    return vectors @ torch.diag(values**-0.25) @ vectors.mT


def net(width):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Linear(5, 3)
    ).double()


def trained(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def muon_groups(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "rule": "adamw"}]


@given(seeds, st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 2]), st.sampled_from([1e-5, 4e-4, 1.0]),
       st.sampled_from([Muon, Shampoo]))  # fmt: skip
@examples(6)
def test_whole_parameters_train_as_in_one_process(seed, p, width, stage, bucket_mb, optimizer_cls):
    """And no rank's state is more than of its own parameters; the whole state goes on in one process."""

    def run(world, x):
        model = net(width)
        groups = muon_groups(model) if optimizer_cls is Muon else model.parameters()
        optimizer = WholeParameterZero(groups, optimizer_cls, world, stage, bucket_mb=bucket_mb, lr=0.05)
        own = [q.numel() for q, owner in optimizer.owners.items() if owner == world.rank]
        got = trained(model, optimizer, x.chunk(world.size)[world.rank])
        held = [shard.numel() for shard, _ in optimizer.tensors_and_states()]
        assert sorted(n for n in held if n) == sorted(own)
        return got, optimizer.full_state_dict() if optimizer_cls is Muon else None

    x = torch.randn(4 * p, width, generator=torch.Generator().manual_seed(seed)).double()
    model = net(width)
    groups = muon_groups(model) if optimizer_cls is Muon else model.parameters()
    optimizer = optimizer_cls(groups, lr=0.05)
    want = trained(model, optimizer, x)
    for got, state in minipar.run(run, x, world_size=p, timeout_s=30):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        if state is not None:
            again = Muon(muon_groups(net(width)), lr=0.05)
            again.load_state_dict(state)
            for a, b in zip(again.state_dict()["state"].values(), optimizer.state_dict()["state"].values()):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@given(st.integers(2, 4), st.sampled_from([1, 2]))
@examples(4)
def test_a_step_sends_the_shares_that_the_docstring_says(p, stage):
    def run(world):
        model = net(6)
        optimizer = WholeParameterZero(
            muon_groups(model), Muon, world, stage, algorithm="ring", bucket_mb=1.0
        )
        (bucket,) = optimizer.buckets
        before = dict(world.traffic.by_kind)
        trained(model, optimizer, torch.randn(4, 6, dtype=torch.float64), steps=1)
        sent = {k: v - before.get(k, 0) for k, v in world.traffic.by_kind.items()}
        return bucket.sizes, sent["reduce_scatter"], sent["all_gather"]

    found = minipar.run(run, world_size=p, timeout_s=30)
    for rank, (sizes, reduced, gathered) in enumerate(found):
        assert reduced == 8 * (sum(sizes) - sizes[rank])
        assert gathered == 8 * (sum(sizes) - sizes[(rank + 1) % p])


def test_the_shares_of_a_transformer_are_balanced_and_counted():
    """Of 12 equal layers on 8 ranks the largest share is within a twentieth of the mean: 84 matrices of few sizes."""

    def run(world):
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = WholeParameterZero(params, Muon, world)
        loads = [0.0] * world.size
        for param, owner in optimizer.owners.items():
            loads[owner] += update_flops(param, {})
        return optimizer.balance(), max(loads) * world.size / sum(loads)

    for (balance,), counted in minipar.run(run, world_size=8, timeout_s=30):
        assert balance == pytest.approx(counted)
        assert 1 <= balance < 1.05


# In the trainer --------------------------------------------------------------------------------------------------------

EXPERTS = replace(VERIFY_DEFAULTS.model, num_experts=4)
MESHES = st.sampled_from([
    dict(dp=2, zero=1), dict(dp=3, zero=2, batch_size=6), dict(dp=2, pp=2, zero=1, microbatches=2),
    dict(dp=2, cp=2, zero=2), dict(dp=4, ep=2, zero=1, model=EXPERTS), dict(dp=4), dict(dp=2, zero=1, dtype="bfloat16"),
    dict(dp=2, zero=1, offload="cpu"),
])  # fmt: skip


@given(MESHES)
@examples(3)
@example(dict(dp=2, pp=2, zero=1, microbatches=2))
def test_every_mesh_trains_as_one_process_does(options):
    result = verify(replace(VERIFY_DEFAULTS, optimizer="muon", steps=3, **options))
    assert result.equal, table(result)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(tp=2), "tp=2 cuts them; use tp=1, or adamw"),
        (dict(dp=2, zero=3), "zero=3 cuts them; use zero=1 or 2"),
    ],
)
def test_what_cuts_matrices_is_refused(options, reason):
    with pytest.raises(ValueError, match=f"optimizer=muon needs whole matrices, and {reason}"):
        TrainConfig(optimizer="muon", **options)


def test_flat_shards_are_refused():
    def refused(world):
        with pytest.raises(
            ValueError, match="Muon is not known to update each element .* use WholeParameterZero"
        ):
            ZeroOptimizer(net(6).parameters(), Muon, world)

    minipar.run(refused, world_size=2, timeout_s=30)
    param = nn.Parameter(torch.ones(6))
    param.grad = torch.ones(6)
    with pytest.raises(ValueError, match=r"shape \(6,\) is no matrix, which Muon needs whole"):
        Muon([param]).step()


# Planted faults --------------------------------------------------------------------------------------------------------

SHAPES = [*[(64, 64)] * 4, (256, 64), (256, 64), (64, 256)] * 12 + [(8, 8)] * 9


def imbalance(ranks):
    loads = [0.0] * 8
    for shape, rank in zip(SHAPES, ranks):
        loads[rank] += newton_schulz_flops(shape)
    return max(loads) * 8 / sum(loads)


@pytest.mark.parametrize(
    ("ranks", "seen"),
    [
        (assign([newton_schulz_flops(s) for s in SHAPES], 8), False),
        ([i % 8 for i in range(len(SHAPES))], True),
        (assign([1.0] * len(SHAPES), 8), True),
    ],
    ids=["by work", "in turn", "by number"],
)
def test_a_share_by_another_rule_is_less_equal(ranks, seen):
    assert (imbalance(ranks) > 1.05) == seen


def apart_with(method, fault):
    """Return the smallest difference from one process on any rank, where the bucket's `method` is `fault`."""

    def apart(world, x):
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(WholeParameterBucket, method)
            patch.setattr(WholeParameterBucket, method, lambda bucket, *args: fault(right, bucket, *args))
            model = net(6)
            optimizer = WholeParameterZero(muon_groups(model), Muon, world, lr=0.05)
            got = trained(model, optimizer, x.chunk(world.size)[world.rank])
        model = net(6)
        want = trained(model, Muon(muon_groups(model), lr=0.05), x)
        return max((a - b).abs().max().item() for a, b in zip(got, want))

    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).double()
    return min(minipar.run(apart, x, world_size=3, timeout_s=30))


def test_a_bucket_that_keeps_its_own_gradients_is_seen():
    def own_gradients_only(right, bucket, *args):
        own = bucket.flat[slice(*bucket.range)].clone()
        right(bucket, *args)()
        return lambda: bucket._store_reduced(own, False)

    assert apart_with("reduce", lambda right, bucket, *args: right(bucket, *args)) < 1e-10
    assert apart_with("reduce", own_gradients_only) > 1e-3


def test_a_chunk_that_ends_inside_a_matrix_is_seen():
    def equal_chunks(right, bucket, num_ranks):
        return [bucket.size // num_ranks] * num_ranks

    with pytest.raises(RankError, match="shape"):
        apart_with("chunk_sizes", equal_chunks)
