"""Experts spread over ranks are the model of one process: logits, loss, every gradient, several steps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
import minipar.model.moe as moe_module
from minipar.config.model_config import ModelConfig
from minipar.expert import AllToAll, expert_parallel
from minipar.mesh import placement_of
from minipar.model import Transformer
from tests.examples import examples
from tests.expert.programs import check_together, differences, sum_gradients
from tests.expert.strategies import Case, cases
from tests.strategies import assert_equal_to


@given(cases=st.lists(cases(), min_size=4, max_size=4), steps=st.integers(1, 3))
@examples(10)
def test_experts_on_any_ranks_are_the_model_of_one_process(cases, steps):
    check_together(cases, steps)


def trained(world, model):
    return {name: p.requires_grad for name, p in expert_parallel(model, world).named_parameters()}


def test_frozen_experts_stay_frozen_on_every_rank():
    model = Transformer(FIXED.config)
    for name, p in model.named_parameters():
        p.requires_grad_("experts" not in name)
    want = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not all(want.values())
    assert minipar.run(trained, model, world_size=2) == [want] * 2


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
    patch.setattr("tests.expert.programs.gradient_comm", lambda mesh: lambda p: mesh.comm("dp"))


def divided_by_ep(world, patch):
    right = sum_gradients

    def wrong(mesh, model):
        right(mesh, model)
        for p in model.parameters():
            p.grad /= mesh.sizes["ep"] if "experts" in placement_of(p).name else 1

    patch.setattr("tests.expert.programs.sum_gradients", wrong)


def router_over_replicas_only(world, patch):
    patch.setattr("tests.expert.programs.gradient_comm", lambda mesh: lambda p: mesh.comm("edp"))


def own_number_of_groups(world, patch):
    patch.setattr("tests.expert.programs.set_num_groups", lambda *args: None)


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_noticed(fault):
    assert any(minipar.run(is_noticed, fault, world_size=4))


def test_without_a_fault_the_same_check_passes():
    assert not any(minipar.run(is_noticed, lambda world, patch: None, world_size=4))
