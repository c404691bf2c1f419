"""Rows on their way: bytes to the formula, overlap, order, refusals; and the public class with a Comm."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar import model
from minipar.expert import SwitchMoE, expert_parallel
from minipar.expert.overlapped_all_to_all import AllToAllRoute, OverlappedAllToAll, transpose_segments
from minipar.mesh import gather, placement_of
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds, splits

D, HIDDEN = 4, 3


def tokens(seed, B, T):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(data=st.data(), a=st.integers(1, 4), b=st.integers(1, 4))
def test_regrouping_transposes_segments_and_is_its_own_inverse(data, a, b):
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(b)] for _ in range(a)]
    rows = torch.tensor([(i, j, n) for i in range(a) for j in range(b) for n in range(sizes[i][j])]).view(
        -1, 3
    )
    found = transpose_segments(rows, sizes)
    assert found.tolist() == sorted(rows.tolist(), key=lambda row: (row[1], row[0], row[2]))
    assert torch.equal(transpose_segments(found, list(zip(*sizes))), rows)


@given(
    data=st.data(),
    seed=seeds,
    ep=st.integers(1, 4),
    each=st.integers(1, 2),
    factor=st.sampled_from([0.5, 1.25, None]),
)
@examples(10)
def test_the_class_with_a_comm_is_the_class_without(data, seed, ep, each, factor):
    k = data.draw(st.integers(1, min(2, ep * each)))
    options = dict(num_experts=ep * each, top_k=k, capacity_factor=factor, seed=seed)
    options |= dict(shared_dim=data.draw(st.sampled_from([0, 2])), group_tokens=4)
    samples = data.draw(splits(data.draw(st.integers(1, 5)), ep))
    x = tokens(seed, sum(samples), 6)

    def body(world):
        moe = SwitchMoE(D, HIDDEN, comm=world, **options).double()
        own = x.split(samples)[world.rank].clone().requires_grad_()
        y, metrics = moe(own)
        y.square().sum().backward()
        parts = [(placement_of(p), p.grad) for p in moe.experts.parameters()]
        return y.detach(), own.grad, metrics.detach(), parts, moe.router.weight.grad

    results = minipar.run(body, world_size=ep)
    for oracle in (SwitchMoE(D, HIDDEN, **options), model.MoE(D, HIDDEN, **options)):
        oracle = oracle.double()
        whole = x.clone().requires_grad_()
        y, metrics = oracle(whole)
        y.square().sum().backward()
        assert_equal_to(torch.cat([r[0] for r in results]), y.detach())
        assert_equal_to(torch.cat([r[1] for r in results]), whole.grad)
        assert torch.equal(sum((r[2] for r in results[1:]), results[0][2]).kept_load, metrics.kept_load)
        for i, parameter in enumerate(oracle.experts.parameters()):
            assert_equal_to(gather([r[3][i] for r in results]), parameter.grad)
        assert_equal_to(sum(r[4] for r in results), oracle.router.weight.grad)


@given(
    seed=seeds,
    ep=st.sampled_from([1, 2, 3, 4]),
    each=st.integers(1, 2),
    k=st.integers(1, 2),
    factor=st.sampled_from([0.5, 1.0, 1.25, None]),
)
@examples(10)
def test_bytes_are_those_of_the_formula(seed, ep, each, k, factor):
    E, T = ep * each, 8
    k = min(k, E)

    def body(world):
        moe = SwitchMoE(D, HIDDEN, E, k, factor, comm=world, seed=seed).double()
        x = tokens(seed + world.rank, 2, T).requires_grad_()
        world.traffic.reset()
        y, metrics = moe(x)
        forward = dict(world.traffic.by_kind)
        y.sum().backward()
        return forward, dict(world.traffic.by_kind), metrics.load

    results = minipar.run(body, world_size=ep)
    for rank, (forward, both, load) in enumerate(results):
        if factor is None:  # rows that go to experts elsewhere, and results for rows from elsewhere
            mine = slice(rank * each, (rank + 1) * each)
            rows = load.sum() - load[mine].sum()
            rows += sum(r[2][mine].sum() for r in results) - load[mine].sum()
        else:  # k * factor * T a sample each way, but for the rounding of the capacity
            rows = 2 * 2 * min(T, math.ceil(k * T / E * factor)) * E * (ep - 1) // ep
        counts = {"all_gather": (ep - 1) * E * 8} if ep > 1 else {}
        moved = {"all_to_all": int(rows) * D * 8} if rows else {}
        assert forward == counts | moved
        assert both == counts | {kind: 2 * num_bytes for kind, num_bytes in moved.items()}


def test_the_formula_of_the_papers_holds_where_capacity_is_whole():
    """k * CF * T * h * (e-1)/e elements each way: T tokens a rank, h wide, whatever the number of experts."""
    for E in (4, 8):

        def body(world, E=E):
            moe = SwitchMoE(D, HIDDEN, E, 2, 1.5, comm=world)
            moe(torch.randn(3, 16, D))
            return world.traffic.by_kind["all_to_all"]

        want = 2 * (2 * 1.5 * (3 * 16) * D * 3 / 4) * 4
        assert minipar.run(body, world_size=4) == [want] * 4


def test_rows_travel_while_the_shared_expert_runs_both_passes():
    def body(world):
        moe, order = SwitchMoE(D, HIDDEN, 2, comm=world, shared_dim=2), []
        moe.shared.register_forward_hook(lambda *_: order.append("shared"))
        moe.shared.gate.weight.register_hook(lambda _: order.append("shared, backward"))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("begin", "finish"):
                right = getattr(OverlappedAllToAll, name)

                def noted(self, *args, name=name, right=right):
                    order.append(f"{name}, async" if self.overlap else name)
                    return right(self, *args)

                patch.setattr(OverlappedAllToAll, name, noted)
            y, _ = moe(torch.randn(2, 4, D, requires_grad=True))
            y.sum().backward()
        return order

    there, back = ["begin, async", "shared", "finish, async"], ["begin", "finish"]
    want = [*there, *back, *back, "begin, async", "shared, backward", "finish, async"]
    assert minipar.run(body, world_size=2) == [want] * 2


@given(data=st.data(), nodes=st.integers(1, 4), node_size=st.integers(1, 4))
@examples(10)
def test_two_levels_bring_what_one_brings_in_fewer_messages_across(data, nodes, node_size):
    p = node_size * min(nodes, 8 // node_size)
    nodes = p // node_size
    sizes = [[data.draw(st.integers(0, 3)) for _ in range(p)] for _ in range(p)]

    def body(world):
        flat, levels = AllToAllRoute(world), AllToAllRoute(world, node_size)
        n = sum(sizes[world.rank])
        x = torch.arange(world.rank * 1000.0, world.rank * 1000 + n)[:, None].expand(n, 2).contiguous()
        want = flat.begin(x, sizes, async_op=False)
        found = levels.begin(x, sizes, async_op=False)
        later = levels.begin(x, sizes, async_op=True).wait()
        levels.across.traffic.reset()
        levels.begin(x, sizes, async_op=False)
        return torch.equal(found, want), torch.equal(later, want), levels.across.traffic.messages

    for same, same_later, messages in minipar.run(body, world_size=p):
        assert same
        assert same_later
        assert messages <= nodes - 1


def test_experts_reached_by_two_levels_are_the_same():
    def body(world, node_size):
        torch.manual_seed(world.rank)
        moe = model.MoE(D, HIDDEN, 8, 2, 1.0, shared_dim=2).double()
        expert_parallel(moe, world, node_size=node_size)
        x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
        y, _ = moe(x)
        y.square().sum().backward()
        return y.detach(), x.grad, moe.experts.up.grad

    one, two = (minipar.run(body, g, world_size=4) for g in (None, 2))
    for a, b in zip(one, two):
        assert all(torch.equal(s, t) for s, t in zip(a, b))


def test_a_switch_layers_default_capacity_factor_is_1_25():
    assert SwitchMoE(D, HIDDEN, 2).options.capacity_factor == 1.25


def test_each_rank_holds_its_share_of_the_experts_and_no_more():
    def body(world):
        moe = SwitchMoE(D, HIDDEN, 8, comm=world)
        kept = {p.untyped_storage().nbytes() for p in moe.experts.parameters()}
        return kept, [placement_of(p) for p in moe.parameters()]

    results = minipar.run(body, world_size=4)
    for rank, (kept, placements) in enumerate(results):
        assert kept == {2 * D * HIDDEN * 4}
        by_name = {p.name: p for p in placements}
        assert by_name["experts.gate"].start == (2 * rank, 0, 0)
        assert by_name["router.weight"].local_shape == (8, D)


def test_experts_that_ranks_cannot_share_out_are_refused():
    def body(world):
        with pytest.raises(ValueError, match="ep=3 does not divide num_experts=8; use 1, 2, 4 or 8"):
            SwitchMoE(D, HIDDEN, 8, comm=world)
        whole = model.MoE(D, HIDDEN, 6)
        with pytest.raises(ValueError, match="node_size=2 does not divide ep=3; use 1 or 3"):
            expert_parallel(whole, world, node_size=2)
        assert whole.experts.gate.shape[0] == 6  # nothing is changed
        moe = SwitchMoE(D, HIDDEN, 6, comm=world)
        with pytest.raises(ValueError, match="2 of num_experts=6 experts are left here"):
            expert_parallel(moe, world)

    minipar.run(body, world_size=3)


def test_a_nan_on_one_rank_is_an_error_that_names_it():
    def body(world):
        x = torch.randn(1, 4, D)
        x[0, 2] = math.nan if world.rank == 1 else 0.0
        SwitchMoE(D, HIDDEN, 2, comm=world)(x)

    with pytest.raises(minipar.RankError, match="1 of 4 tokens, the first at \\(0, 2\\)") as error:
        minipar.run(body, world_size=2)
    assert error.value.rank == 1
