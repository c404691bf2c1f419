"""Cuts of a model: the best there are, and the same numbers as the model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import minipar
from minipar import clip_grad_norm_
from minipar.config.model_config import ModelConfig
from minipar.mesh import placement_of
from minipar.model import MoE, Transformer
from minipar.pipeline import Pipeline, balance, partition
from minipar.pipeline.partition import layer_costs
from minipar.schedules.costs import Costs
from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.simulate import simulate
from tests.examples import examples
from tests.strategies import assert_equal_to

layer_cost = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0])


@given(st.lists(layer_cost, min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    all_speeds = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=num_stages, max_size=num_stages)
    speeds = data.draw(st.none() | all_speeds)

    def slowest(cuts):
        return max(sum(costs[i] for i in layers) / s for layers, s in zip(cuts, speeds or [1.0] * len(cuts)))

    every_cut = (
        [range(*ends) for ends in pairwise((0, *inner, len(costs)))]
        for inner in combinations(range(1, len(costs)), num_stages - 1)
    )
    got = balance(costs, num_stages, speeds)
    assert [i for layers in got for i in layers] == list(range(len(costs)))
    assert len(got) == num_stages
    assert all(got)
    assert slowest(got) == min(map(slowest, every_cut))


def step_seconds(cuts, speeds) -> float:
    """Of a simulated step on ranks of these speeds, with one unit per layer for each of F, I and W."""
    seconds = tuple(len(layers) / speed for layers, speed in zip(cuts, speeds))
    return simulate(one_f_one_b(len(cuts), 8), Costs(seconds, seconds, seconds)).longest_own_span


@pytest.mark.parametrize("slow", range(4))
def test_half_the_layers_for_a_half_speed_rank_speeds_up_steps(slow):
    speeds = [0.5 if rank == slow else 1.0 for rank in range(4)]
    equal, unequal = [range(0, 4), range(4, 8), range(8, 11), range(11, 14)], balance([1] * 14, 4, speeds)
    assert [len(layers) for layers in unequal] == [2 if rank == slow else 4 for rank in range(4)]
    assert step_seconds(unequal, speeds) < 0.84 * step_seconds(equal, speeds)


def test_a_speed_that_cannot_be_is_refused():
    with pytest.raises(
        ValueError, match=r"speeds=\[1, 0\] for num_stages=2; give a number above 0 per stage"
    ):
        balance([1, 1], 2, [1, 0])
    with pytest.raises(ValueError, match=r"speeds=\[1\] for num_stages=2"):
        balance([1, 1], 2, [1])


def test_a_wide_head_is_worth_layers():
    config = ModelConfig(num_layers=6, dim=32, num_heads=4, vocab_size=2048, max_seq_len=32)
    model = Transformer(config)
    costs = layer_costs(model)
    assert costs[-1] - costs[1] == 32 * 2048
    stages = partition(model, 3)
    assert [list(stage.layers) for stage in stages] == [["0", "1"], ["2", "3", "4"], ["5"]]
    assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert [list(stage.layers) for stage in partition(model, 3, costs=[1] * 6)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]


def rows_of_experts(model, tokens) -> list[int]:
    """How many rows the experts of each layer compute, 0 without experts."""
    rows = {}
    for name, layer in model.layers.items():
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, args, name=name: rows.update({name: len(args[0])})
            )
    model(tokens)
    return [rows.get(name, 0) for name in model.layers]


@pytest.mark.parametrize("options", [
    dict(top_k=1), dict(top_k=2, shared_dim=24), dict(top_k=2, router="expert_choice", capacity_factor=1.5),
    dict(router="expert_choice", group_tokens=None),
])  # fmt: skip
def test_a_layer_costs_what_its_tokens_reach_of_the_experts(options):
    """Not all E of them: the rows that the experts compute, times the elements of one expert, beside the rest."""
    options = dict(group_tokens=4, capacity_factor=8.0) | options
    config = ModelConfig(num_layers=4, dim=16, num_heads=2, hidden_dim=24, vocab_size=32, max_seq_len=16,
                         num_experts=8, moe_every=2, **options)  # fmt: skip
    model = Transformer(config)
    rows = rows_of_experts(model, torch.randint(0, 32, (2, 16)))
    assert [n > 0 for n in rows] == [config.has_experts(layer) for layer in range(4)]
    dense = 2 * 16 * (16 + config.num_kv_heads * config.head_dim) + 16 * 16  # attention and its scores
    want = [
        dense + (n / 32 * 3 * 16 * 24 + 16 * 8 + 3 * 16 * config.shared_dim if n else 3 * 16 * 24)
        for n in rows
    ]
    want[0] += 16
    want[-1] += 16 * 32
    assert layer_costs(model) == pytest.approx(want)


@examples(10)
@given(st.integers(1, 5), st.data())
def test_the_stages_in_turn_are_the_model_bit_for_bit(num_layers, data):
    config = ModelConfig(num_layers=num_layers, dim=16, num_heads=2, vocab_size=32, max_seq_len=8)
    model = Transformer(config, dtype=torch.float64)
    tokens = torch.randint(0, 32, (2, 8))
    x = tokens
    for stage in partition(model, data.draw(st.integers(1, num_layers))):
        x = stage(x)
    assert torch.equal(x, model(tokens))


class Trunk(NamedTuple):
    """A model of four layers, and the number that it makes of a batch."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def trunk(kind) -> Trunk:
    torch.manual_seed(0)
    if kind == "sequential":
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
        return Trunk(model, *torch.randn(2, 4, 8, dtype=torch.float64), nn.functional.mse_loss)
    config = ModelConfig(num_layers=4, dim=16, num_heads=2, vocab_size=32, max_seq_len=8)
    model = Transformer(config, dtype=torch.float64)
    return Trunk(
        model, *torch.randint(0, 32, (2, 4, 8)), lambda y, t: cross_entropy(y.flatten(0, 1), t.flatten())
    )


def clipped_in_stages(world, kind):
    whole = trunk(kind)
    stage = partition(whole.model, world.size)[world.rank]
    pipeline = Pipeline([stage], world, one_f_one_b(world.size, 2), whole.loss)
    pipeline.step(whole.inputs, whole.targets)
    return clip_grad_norm_(stage.parameters(), 1.0, world), [placement_of(p).name for p in stage.parameters()]


@pytest.mark.parametrize("kind", ["sequential", "transformer"])
def test_stages_are_clipped_by_the_norm_of_the_model(kind):
    """Their parameters have the model's names, so that nothing counts twice, or as a copy of another stage's."""
    whole = trunk(kind)
    whole.loss(whole.model(whole.inputs), whole.targets).backward()
    want = nn.utils.clip_grad_norm_(whole.model.parameters(), 1.0)
    norms, names = zip(*minipar.run(clipped_in_stages, kind, world_size=2))
    for norm in norms:
        assert_equal_to(norm, want, what="norm")
    assert names[0] + names[1] == [name for name, _ in whole.model.named_parameters()]


def test_the_stages_of_a_sequential_are_copies():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    of_stages = {p.data_ptr() for stage in partition(model, 2) for p in stage.parameters()}
    assert of_stages.isdisjoint({p.data_ptr() for p in model.parameters()})


def test_fewer_layers_than_stages_are_refused():
    model = Transformer(ModelConfig(num_layers=2))
    with pytest.raises(
        ValueError, match="2 layers for num_stages=3: a stage needs a layer; use at most 2 stages"
    ):
        partition(model, 3)
    with pytest.raises(
        ValueError, match="a Linear cannot be cut into stages; put its layers, each from one tensor to"
    ):
        partition(torch.nn.Linear(4, 4), 2)
    with pytest.raises(ValueError, match="costs has 3 entries for 2 layers"):
        partition(model, 2, costs=[1, 1, 1])
    with pytest.raises(ValueError, match="negative"):
        balance([1, -1], 1)


def test_a_layer_that_two_stages_would_share_is_refused():
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(shared, torch.nn.Linear(4, 4), shared)
    with pytest.raises(
        ValueError,
        match=r"2\.weight of stage 1 is 0\.weight of stage 0, and each would train a copy; untie them",
    ):
        partition(model, 2, costs=[1, 1, 1])
    (whole,) = partition(model, 1)
    assert whole[0] is whole[2]
    inside = torch.nn.Sequential(torch.nn.Linear(4, 4), shared, shared)
    assert [len(stage) for stage in partition(inside, 2, costs=[2, 1, 1])] == [1, 2]
    shared.requires_grad_(False)  # then the copies stay equal
    assert len(partition(model, 3)) == 3
