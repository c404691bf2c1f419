"""Experts spread over ranks are the model of one process: logits, loss, every gradient, several steps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minipar
import minipar.model.moe as moe_module
from minipar.expert import AllToAll, expert_parallel, gradient_comm
from minipar.mesh import Mesh, place_whole, placement_of
from minipar.model import IGNORE_INDEX, ModelConfig, set_num_groups, take_metrics, update_balance_bias
from tests.expert.strategies import Case, cases
from tests.strategies import assert_equal_to


def spread(case: Case, mesh: Mesh):
    ways = {
        name: getattr(case, name) for name in ("algorithm", "node_size", "chunks", "once_per_node", "shadow")
    }
    model = expert_parallel(case.model(), mesh.comm("ep"), **ways)
    place_whole(model)
    set_num_groups(model, case.config.num_groups(sum(case.samples), case.length))
    return model


def own_loss(case: Case, mesh: Mesh, model, step: int = 0):
    """This rank's part of the loss."""
    tokens, targets = case.tokens(step)
    rows = case.rows(mesh.coordinates.dp)
    count = int((targets != IGNORE_INDEX).sum())
    return model.loss(tokens[rows], targets[rows], sample_ids=rows, step=step, count=count)


def sum_gradients(mesh: Mesh, model) -> None:
    """Over the ranks that `gradient_comm` says; all gradients of the same ranks in one message."""
    comm_of, together = gradient_comm(mesh), {}
    for parameter in model.parameters():
        together.setdefault(comm_of(parameter), []).append(parameter.grad)
    for comm, gradients in together.items():
        total = comm.all_reduce(torch.cat([g.flatten() for g in gradients]))
        for g, part in zip(gradients, total.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))


def differences(world, case: Case, steps: int):
    """Train both; then (found, wanted, what) for all that should be equal. Compared afterwards, so that no rank is left
    waiting for one that found a difference."""
    mesh = Mesh(world, dp=case.dp, ep=case.ep)
    model, oracle = spread(case, mesh), case.model()
    pairs = []
    for step in range(steps):
        tokens, targets = case.tokens(step)
        rows = case.rows(mesh.coordinates.dp)
        logits = model(tokens[rows], sample_ids=rows, step=step)
        pairs.append((logits, oracle(tokens, step=step)[rows], "logits"))
        take_metrics(model)
        take_metrics(oracle)
        loss, want = own_loss(case, mesh, model, step), oracle.loss(tokens, targets, step=step)
        pairs.append((world.all_reduce(loss.detach()), want.detach(), "loss"))
        loss.backward()
        want.backward()
        sum_gradients(mesh, model)
        pairs += of_parameters(
            model, {name: p.grad for name, p in oracle.named_parameters()}, "gradient", "grad"
        )
        pairs += of_metrics(mesh, take_metrics(model), take_metrics(oracle))
        for m, comm in ((model, mesh.comm("dp")), (oracle, None)):
            update_balance_bias(m, 0.05, comm)
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    wanted = {name: p.data for name, p in oracle.named_parameters()}
    pairs += of_parameters(model, wanted, "value after the last step", "data")
    biases = dict(oracle.named_buffers())
    return pairs + [(found, biases[name], name) for name, found in model.named_buffers()]


def of_parameters(model, wanted, what: str, attribute: str):
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        want = placement.slice_of(wanted[placement.name]).clone()
        yield getattr(parameter, attribute).clone(), want, f"{what} of {name}"


def of_metrics(mesh, found, wanted):
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        fields = ("balance_loss", "z_loss", "load", "kept_load", "unserved", "entropy_sum")
        ours, theirs = (
            torch.cat([getattr(metrics, f).double().reshape(-1) for f in fields])
            for metrics in (found[name], want)
        )
        yield mesh.comm("dp").all_reduce(ours), theirs, f"metrics of {name}"


def compare(world, case: Case, steps: int = 1) -> None:
    for found, wanted, what in differences(world, case, steps):
        assert_equal_to(found, wanted, floor=1e-13, what=what)


@given(cases=st.lists(cases(), min_size=4, max_size=4), steps=st.integers(1, 3))
@settings(max_examples=10)
def test_experts_on_any_number_of_ranks_are_the_model_of_one_process(cases, steps):
    """In one run several models, as a run on many ranks costs more than such small ones."""

    def body(world):
        for case in cases:
            if world.rank < case.dp:
                sub = world.subgroup(range(case.dp), str(case))
                compare(sub, case, steps)

    minipar.run(body, world_size=max(c.dp for c in cases), timeout_s=10)


# Faults that people make, and how they show ---------------------------------------------------------------------------

FIXED = Case(
    config=ModelConfig(
        vocab_size=7, dim=4, num_layers=2, num_heads=2, hidden_dim=3, num_experts=4, top_k=2, moe_every=1
    ),
    dp=4,
    ep=2,
    samples=[2, 0, 1, 3],
    length=8,
    seed=0,
    ties=False,
    algorithm="auto",
)


def averaged_over_ep(world, patch):
    """Expert gradients as of any other parameter, over all data ranks: each rank adds another expert's."""
    patch.setattr("tests.expert.test_expert.gradient_comm", lambda mesh: lambda p: mesh.comm("dp"))


def divided_by_ep(world, patch):
    right = sum_gradients

    def wrong(mesh, model):
        right(mesh, model)
        for p in model.parameters():
            p.grad /= mesh.sizes["ep"] if "experts" in placement_of(p).name else 1

    patch.setattr("tests.expert.test_expert.sum_gradients", wrong)


def router_over_replicas_only(world, patch):
    patch.setattr("tests.expert.test_expert.gradient_comm", lambda mesh: lambda p: mesh.comm("edp"))


def own_number_of_groups(world, patch):
    patch.setattr("tests.expert.test_expert.set_num_groups", lambda *args: None)


def capacity_per_rank(world, patch):
    """All tokens of a rank in one group: another number of ranks, another model."""
    right = moe_module.RoutingGroups
    patch.setattr(
        moe_module,
        "RoutingGroups",
        lambda B, T, g: right(B, T, g) if B == 6 else right(1, B * T, max(1, B * T)),
    )


def dispatch_under_no_grad(world, patch):
    right = AllToAll.__call__
    patch.setattr(AllToAll, "__call__", lambda self, rows, counts: right(self, rows.detach(), counts))


def results_to_the_wrong_rank(world, patch):
    right = AllToAll.__call__

    def wrong(self, rows, counts):
        dispatched = right(self, rows, counts)
        dispatched.segments = dispatched.segments[::-1]
        return dispatched

    patch.setattr(AllToAll, "__call__", wrong)


def jitter_drawn_in_order_of_calls(world, patch):
    patch.setattr(
        moe_module.Router, "_uniform", lambda self, n, site, step, positions, sample_ids: torch.rand(())
    )


def second_expert_drawn_by_each_rank(world, patch):
    right = moe_module.Router.draw_second
    patch.setattr(
        moe_module.Router,
        "draw_second",
        lambda self, indices, sample_ids, step: right(self, indices, torch.arange(len(sample_ids)), step),
    )


FAULTS = [
    averaged_over_ep,
    divided_by_ep,
    router_over_replicas_only,
    own_number_of_groups,
    capacity_per_rank,
    dispatch_under_no_grad,
    results_to_the_wrong_rank,
    jitter_drawn_in_order_of_calls,
    second_expert_drawn_by_each_rank,
]


def is_noticed(world, fault) -> bool:
    case = FIXED._replace(config=replace(FIXED.config, jitter=0.1, random_second=True))
    with pytest.MonkeyPatch.context() as patch:
        fault(world, patch)
        pairs = differences(world, case, steps=1)
    try:
        for found, wanted, what in pairs:
            assert_equal_to(found, wanted, floor=1e-13, what=what)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_noticed(fault):
    assert any(minipar.run(is_noticed, fault, world_size=4, timeout_s=10))


def test_without_a_fault_the_same_check_passes():
    assert not any(minipar.run(is_noticed, lambda world, patch: None, world_size=4, timeout_s=10))
