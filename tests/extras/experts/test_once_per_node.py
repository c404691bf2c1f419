"""A token goes to a node once: the numbers of one process, and bytes across nodes that the router's limit bounds."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.expert import expert_parallel
from minipar.extras.experts import once_per_node
from minipar.extras.experts.once_per_node import NodeDedupDispatch
from minipar.mesh import gather, placement_of
from minipar.model import MoE
from minipar.model.groups import RoutingGroups
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds, splits

D, HIDDEN, T, FLOAT64 = 4, 3, 6, 8


class Case(NamedTuple):
    nodes: int
    node_size: int
    options: dict
    samples: list[int]  # of each rank
    chunks: int
    seed: int

    @property
    def ep(self) -> int:
        return self.nodes * self.node_size

    def layer(self) -> MoE:
        moe = MoE(D, HIDDEN, seed=self.seed, **self.options).double()
        moe.router.weight.data *= 50  # so that experts are unlike, and some are avoided
        return moe

    def x(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(sum(self.samples), T, D, generator=generator, dtype=torch.float64)

    def used(self) -> list[torch.Tensor]:
        """Of each rank, whether a token has a kept choice on a node: [tokens, nodes]."""
        moe, x = self.layer(), self.x()
        logits = moe.router(x, torch.arange(T), torch.arange(len(x)))
        routing = moe.route(logits, RoutingGroups(len(x), T, T))
        node = routing.expert.div(self.options["num_experts"] // self.nodes, rounding_mode="floor")
        used = [(routing.kept & (node == n)).any(1) for n in range(self.nodes)]
        return list(torch.stack(used, 1).split([T * n for n in self.samples]))


@st.composite
def cases(draw) -> Case:
    nodes = draw(st.integers(1, 4))
    node_size = draw(st.integers(1, 8 // nodes))
    num_experts = nodes * node_size * draw(st.integers(1, 2))
    k = draw(st.integers(1, min(4, num_experts)))
    options = dict(num_experts=num_experts, top_k=k, capacity_factor=draw(st.sampled_from([0.5, 1.25, None])))
    options["shared_dim"] = draw(st.sampled_from([0, 2]))
    least = -(-k * nodes // num_experts)
    if draw(st.booleans()):
        options |= dict(expert_nodes=nodes, nodes_per_token=draw(st.integers(least, nodes)))
    samples = draw(splits(draw(st.integers(1, 10)), nodes * node_size))
    return Case(nodes, node_size, options, samples, draw(st.sampled_from([1, 1, 2])), draw(seeds))


def on_ranks(world, case: Case):
    """This rank's output and gradients, and the bytes that it sent across nodes, forward and backward."""
    moe = case.layer()
    expert_parallel(moe, world, dispatch="once-per-node", node_size=case.node_size, chunks=case.chunks)
    x = case.x().split(case.samples)[world.rank].clone().requires_grad_()
    across = moe.overrides.dispatch_tokens.across.comm.traffic if case.ep > 1 else world.traffic
    y, _ = moe(x)
    forward = dict(across.by_kind)
    across.reset()
    y.square().sum().backward()
    experts = [(placement_of(p), p.grad) for p in moe.experts.parameters()]
    return y.detach(), x.grad, experts, moe.router.weight.grad, forward, dict(across.by_kind)


def compare(case: Case, results) -> None:
    oracle, x = case.layer(), case.x().requires_grad_()
    y, _ = oracle(x)
    y.square().sum().backward()
    assert_equal_to(torch.cat([r[0] for r in results]), y.detach(), floor=1e-13)
    assert_equal_to(torch.cat([r[1] for r in results]), x.grad, floor=1e-13)
    for i, parameter in enumerate(oracle.experts.parameters()):
        assert_equal_to(gather([r[2][i] for r in results]), parameter.grad, floor=1e-13)
    assert_equal_to(sum(r[3] for r in results), oracle.router.weight.grad, floor=1e-13)


def check_bytes(case: Case, results) -> None:
    """S rows go to other nodes, and R come: S (D + k) + R D elements and 4 k S bytes forward, S D + R (D + k) backward."""
    used, k, g = case.used(), case.options["top_k"], case.node_size
    limit = case.options.get("nodes_per_token", case.nodes)
    for rank, (*_, forward, backward) in enumerate(results):
        node, place = divmod(rank, g)
        others = [n for n in range(case.nodes) if n != node]
        sent = int(used[rank][:, others].sum())
        came = sum(int(used[n * g + place][:, node].sum()) for n in others)
        assert sent <= min(k, limit, case.nodes - 1) * len(used[rank])
        counts = {"all_gather": 8 * case.nodes * len(others)} if others else {}
        rows = FLOAT64 * (sent * (D + k) + came * D) + 4 * k * sent
        assert forward == counts | ({"all_to_all": rows} if rows else {})
        rows = FLOAT64 * (sent * D + came * (D + k))
        assert backward == ({"all_to_all": rows} if rows else {})


@given(st.lists(cases(), min_size=3, max_size=3))
@examples(4)
def test_tokens_that_go_to_a_node_once_are_those_of_one_process_and_their_bytes_the_formula(drawn):
    def body(world):
        return [
            on_ranks(world.subgroup(range(case.ep), f"case {i}"), case) if world.rank < case.ep else None
            for i, case in enumerate(drawn)
        ]

    by_rank = minipar.run(body, world_size=8)
    for i, case in enumerate(drawn):
        results = [found[i] for found in by_rank[: case.ep]]
        compare(case, results)
        if case.ep > 1:
            check_bytes(case, results)


LIMITED = Case(
    nodes=2,
    node_size=2,
    options=dict(num_experts=8, top_k=4, capacity_factor=None, expert_nodes=2, nodes_per_token=1),
    samples=[2, 1, 0, 3],
    chunks=1,
    seed=0,
)


def rows_across(world, case: Case, once_per_node: bool) -> float:
    """The bytes of all-to-alls that this rank sends across nodes forward."""
    moe = case.layer()
    dispatch = "once-per-node" if once_per_node else "all-to-all"
    expert_parallel(moe, world, dispatch=dispatch, node_size=case.node_size)
    if once_per_node:
        comm = moe.overrides.dispatch_tokens.across.comm
    else:
        comm = moe.overrides.dispatch.route.across
    comm.traffic.reset()
    moe(case.x().split(case.samples)[world.rank])
    return comm.traffic.by_kind["all_to_all"]


def test_four_choices_on_one_node_are_one_row_there_instead_of_four():
    other = sum(int(used[:, 1 - rank // 2].sum()) for rank, used in enumerate(LIMITED.used()))
    assert other > 0
    each, once = (sum(minipar.run(rows_across, LIMITED, way, world_size=4)) for way in (False, True))
    assert each == 4 * other * 2 * FLOAT64 * D
    k = 4
    assert once == other * (FLOAT64 * (2 * D + k) + 4 * k)


# Faults --------------------------------------------------------------------------------------------------------------


def experts_counted_from_the_first(patch):
    patch.setattr(
        "minipar.extras.experts.once_per_node.experts_at_nodes",
        lambda expert, each, nodes: (expert[nodes.choice // nodes.row.shape[1]] % each).int(),
    )


def weights_without_a_gradient(patch):
    right = NodeDedupDispatch.__call__
    patch.setattr(
        NodeDedupDispatch, "__call__", lambda self, x, weight, plan: right(self, x, weight.detach(), plan)
    )


def own_node_left_out(patch):
    def wrong(parts, weight, plan):
        first = plan.row.clone()
        first[:, 0] = -1
        return right(parts, weight, plan._replace(row=first))

    right = once_per_node.combine
    patch.setattr(once_per_node, "combine", wrong)


@pytest.mark.parametrize(
    "fault",
    [experts_counted_from_the_first, weights_without_a_gradient, own_node_left_out],
    ids=lambda f: f.__name__,
)
def test_a_fault_is_noticed(fault):
    case = LIMITED._replace(options=dict(num_experts=8, top_k=3, capacity_factor=None))

    def body(world):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            return on_ranks(world, case)

    with pytest.raises(AssertionError):
        compare(case, minipar.run(body, world_size=4))
