"""Hot experts come to their rows: the same numbers, the busiest rank's rows and all bytes as reckoned."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.expert import expert_parallel
from minipar.extras.experts import shadowed_experts
from minipar.extras.experts.shadow_placement import break_even_rows, choose_shadowed, rows_of_ranks
from minipar.mesh import gather, placement_of
from minipar.model import MoE, grouped_mlp
from tests.strategies import assert_equal_to

D, HIDDEN, E, TOKENS = 4, 3, 8, 24


@st.composite
def counts(draw):
    ep, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return [[draw(st.integers(0, 9)) for _ in range(ep * each)] for _ in range(ep)]


@given(counts(), st.integers(0, 12))
def test_each_replica_saves_more_than_it_costs_and_one_more_would_not(counts, break_even):
    chosen = choose_shadowed(counts, break_even)
    before, after = max(rows_of_ranks(counts)), max(rows_of_ranks(counts, chosen))
    assert sum(rows_of_ranks(counts, chosen)) == sum(map(sum, counts))  # each row is computed once
    assert before - after >= (break_even + 1) * len(chosen)
    busiest = rows_of_ranks(counts, chosen).index(after)
    each = len(counts[0]) // len(counts)
    own = [e for e in range(busiest * each, (busiest + 1) * each) if e not in chosen]
    hottest = max(own, key=lambda e: sum(source[e] for source in counts), default=None)
    assert hottest is None or after - max(rows_of_ranks(counts, [*chosen, hottest])) <= break_even


def test_the_rule_is_fastermoes():
    """Two ranks, an expert each; everybody chose expert 0. Seconds with and without a replica, at its break-even."""
    dim, hidden, flops_per_s, bytes_per_s, size = 8, 32, 1e9, 1e6, 4
    row_s, send_s = 6 * dim * hidden / flops_per_s, dim * size / bytes_per_s
    weights_s = 3 * dim * hidden * size / bytes_per_s

    def seconds(counts, shadowed):
        return (3 * row_s + 4 * send_s) * max(rows_of_ranks(counts, shadowed)) + 2 * weights_s * len(shadowed)

    rows = break_even_rows(hidden, flops_per_s, bytes_per_s, size)
    assert rows == pytest.approx(2 * weights_s / (3 * row_s + 4 * send_s))
    for saved in (int(rows), int(rows) + 1):
        counts = [[saved, 0], [saved, 0]]  # a replica takes half of them off rank 0
        pays = seconds(counts, [0]) < seconds(counts, [])
        assert choose_shadowed(counts, rows) == ([0] if pays else [])
        assert pays == (saved > rows)
    assert break_even_rows(hidden, 1e30, bytes_per_s, size) == pytest.approx(1.5 * hidden)


def layer() -> MoE:
    """Experts 0 and 1, both of rank 0 of 4, are chosen by many."""
    moe = MoE(D, HIDDEN, E, 2, None, seed=2, shared_dim=2).double()
    with torch.no_grad():
        moe.router.weight *= 50
        moe.router.weight[:2, 0] += 1.5
    return moe


def batch() -> torch.Tensor:
    x = torch.randn(4, TOKENS, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[..., 0] = 1
    return x


def on_ranks(world, rows: float | None):
    """rows  as of dispatch="shadow"; None: no expert is replicated"""
    way = dict(dispatch="all-to-all") if rows is None else dict(dispatch="shadow", rows=rows)
    moe, computed = expert_parallel(layer(), world, **way), []
    x = batch()[world.rank : world.rank + 1].clone().requires_grad_()
    right = grouped_mlp.grouped_swiglu
    with pytest.MonkeyPatch.context() as patch:
        for module in (grouped_mlp, shadowed_experts):
            if hasattr(module, "grouped_swiglu"):
                patch.setattr(
                    module, "grouped_swiglu", lambda x, *rest: (computed.append(len(x)), right(x, *rest))[1]
                )
        world.traffic.reset()
        y, metrics = moe(x)
        forward = dict(world.traffic.by_kind)
        y.square().sum().backward()
    experts = [(placement_of(p), p.grad) for p in moe.experts.parameters()]
    return (y.detach(), x.grad, moe.router.weight.grad), experts, sum(computed), metrics.load, (
        forward,
        dict(world.traffic.by_kind),
    )  # fmt: skip


def compare(results) -> None:
    oracle, x = layer(), batch().requires_grad_()
    y, _ = oracle(x)
    y.square().sum().backward()
    assert_equal_to(torch.cat([r[0][0] for r in results]), y.detach())
    assert_equal_to(torch.cat([r[0][1] for r in results]), x.grad)
    assert_equal_to(sum(r[0][2] for r in results), oracle.router.weight.grad)
    for i, parameter in enumerate(oracle.experts.parameters()):
        assert_equal_to(gather([r[1][i] for r in results]), parameter.grad)


def test_shadowed_experts_match_one_process_and_the_formulas():
    plain = minipar.run(on_ranks, None, world_size=4)
    results = minipar.run(on_ranks, 4, world_size=4)
    compare(plain)
    compare(results)
    load = [r[3].tolist() for r in results]
    hot = choose_shadowed(load, 4)
    assert hot == [0, 1]
    assert [r[2] for r in plain] == rows_of_ranks(load)
    assert [r[2] for r in results] == rows_of_ranks(load, hot)
    assert sum(sum(source[2:]) for source in load) > 0  # others travel as before
    assert max(r[2] for r in results) < 0.7 * max(r[2] for r in plain)
    for rank, (*_, (forward, both)) in enumerate(results):
        own = [e for e in range(E) if e // 2 == rank]
        cold = [e for e in range(E) if e not in hot]
        away = sum(load[rank][e] for e in cold if e not in own)
        came = sum(source[e] for r, source in enumerate(load) if r != rank for e in cold if e in own)
        assert forward.get("all_to_all", 0) == 8 * D * (away + came)
        assert both.get("all_to_all", 0) == 2 * forward.get("all_to_all", 0)
    weights = 3 * 8 * 3 * D * HIDDEN * len(hot)  # to the ranks that do not have them
    assert sum(r[4][0].get("broadcast", 0) for r in results) == weights
    assert sum(r[4][1].get("reduce", 0) for r in results) == weights


def own_gradient_alone(patch):
    patch.setattr(shadowed_experts._Replicate, "backward", staticmethod(lambda ctx, grad: (grad, None, None)))


def rows_joined_in_another_order(patch):
    patch.setattr(shadowed_experts, "_join", lambda hot, others, *_: torch.cat([others, hot]))


@pytest.mark.parametrize(
    "fault", [own_gradient_alone, rows_joined_in_another_order], ids=lambda f: f.__name__
)
def test_a_fault_is_noticed(fault):
    def body(world):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            return on_ranks(world, 4)

    with pytest.raises(AssertionError):
        compare(minipar.run(body, world_size=4))


def test_what_does_not_fit_is_refused():
    def body(world):
        for options, says in (
            (dict(rows=-1.0), "dispatch.rows=-1.0 with ep=2: .*; use 0 or more with ep=2 or more"),
            (
                dict(rows=4.0, chunks=2),
                "dispatch.chunks is no option; use dispatch.node_size or dispatch.rows",
            ),
        ):
            with pytest.raises(ValueError, match=says):
                expert_parallel(layer(), world, dispatch="shadow", **options)

    minipar.run(body, world_size=2)
