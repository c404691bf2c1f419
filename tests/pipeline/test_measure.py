"""Runs as timelines: stages that sleep take the time they cost, and a timeline gives its costs back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.mesh import Mesh
from minipar.model import Transformer
from minipar.pipeline import balance, measure, measure_layers, measured_costs, partition
from minipar.pipeline.emulate import emulate
from minipar.schedules.costs import Costs
from minipar.schedules.simulate import simulate
from minipar.schedules.v_shaped import dualpipe_v
from minipar.schedules.zero_bubble import zb_h1
from minipar.train import parallelize
from minipar.train.verification.verify import table, verify
from tests.pipeline.programs import check_emulated
from tests.pipeline.strategies import costs, schedules


@given(st.data(), schedules(max_ranks=4, max_microbatches=6))
def test_the_costs_of_a_timeline_are_those_it_was_simulated_with(data, schedule):
    given_costs = data.draw(costs(schedule.num_stages))
    spans = simulate(schedule, given_costs).spans
    want, got = (c.table(schedule.num_stages) for c in (given_costs, measured_costs(schedule, spans)))
    split = {action.stage for action in spans if action.op == "W"}
    for s in range(schedule.num_stages):
        assert got["F"][s] == pytest.approx(want["F"][s])
        assert got["B"][s] == pytest.approx(want["B"][s])
        assert got["W"][s] == pytest.approx(want["W"][s] if s in split else 0)


@pytest.mark.parametrize("schedule", [zb_h1(3, 3), dualpipe_v(2, 4)], ids=lambda s: s.name)
def test_an_emulated_action_takes_at_least_what_it_costs(schedule):
    check_emulated(schedule)


def test_the_ranks_of_an_emulation_begin_each_step_together():
    def barriers(world):
        emulate(world, zb_h1(2, 2), Costs(0, 0, 0), steps=3)
        return world.traffic.by_kind["barrier"]

    assert minipar.run(barriers, world_size=2) == [3, 3]


class Noting(nn.Linear):
    def forward(self, x):
        self.saw = x.requires_grad
        return super().forward(x)


def test_a_layers_seconds_include_the_gradient_of_its_input():
    layers = [Noting(2, 2), Noting(2, 2)]
    measure.seconds_of(layers, torch.ones(1, 2), repeats=1, clock=lambda: 0.0)
    assert [layer.saw for layer in layers] == [True, True]


class Ticking(nn.Module):
    """A product whose forwards move a clock: by nothing at first, then by twice, once, and three times `seconds`."""

    def __init__(self, clock: list[float], seconds: float):
        super().__init__()
        self.clock, self.weight = clock, nn.Parameter(torch.ones(2))
        self.seconds = [3 * seconds, seconds, 2 * seconds, 0.0]

    def forward(self, x):
        self.clock[0] += self.seconds.pop()
        return x * self.weight


@given(st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=2, max_size=6))
def test_layers_cost_their_least_seconds_after_a_first_run(seconds):
    clock = [0.0]
    model = nn.Sequential(*(Ticking(clock, s) for s in seconds))
    assert measure_layers(model, torch.ones(2), clock=lambda: clock[0]) == seconds
    assert all(layer.weight.grad is None for layer in model)
    assert [len(stage) for stage in partition(model, 2, seconds)] == [len(own) for own in balance(seconds, 2)]


def test_the_layers_of_a_transformer_are_timed_with_its_ends():
    config = ModelConfig(vocab_size=16, dim=8, num_layers=3, num_heads=2, max_seq_len=4)
    model, calls, ran = Transformer(config), iter(range(100)), Counter()
    for name in ("embedding", "head"):  # each stage copies what it has of the two, and the hooks with it
        getattr(model, name).register_forward_hook(lambda *_, name=name: ran.update([name]))
    costs = measure_layers(model, torch.zeros(1, 4, dtype=torch.int64), repeats=1, clock=lambda: next(calls))
    assert costs == [1, 1, 1]  # the clock is read before and after each layer
    assert next(calls) == 3 * 2 * 2
    assert ran == {"embedding": 2, "head": 2}


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1)])
def test_the_clock_is_read_when_the_gpu_has_finished(device, waits):
    with patch.object(torch.cuda, "synchronize") as synchronize:
        measure._clock_of(torch.device(device))()
    assert synchronize.call_count == waits


def cut_by_measurement(world, config):
    """The layers of this rank's stages, where every rank would measure other costs."""
    costs = [3.0, 1.0, 1.0, 1.0] if world.rank == 0 else [1.0, 1.0, 1.0, 9.0]

    def seconds_of(layers, x):
        assert [list(layer.layers) for layer in layers] == [["0"], ["1"], ["2"], ["3"]]
        assert tuple(x.shape) == (16, 4)
        return costs

    with patch.object(parallelize, "seconds_of", seconds_of):
        return [
            list(s.layers) for s in parallelize.parallelize(config, Mesh(world, pp=2), world.device).stages
        ]


def test_all_ranks_of_a_run_cut_by_what_rank_0_measured():
    model = ModelConfig(vocab_size=256, dim=8, num_layers=4, num_heads=2, max_seq_len=4)
    config = TrainConfig(model=model, pp=2, seq_len=4, layer_costs="measured")
    assert minipar.run(cut_by_measurement, config, world_size=2) == [[["0"]], [["1", "2", "3"]]]
    computed = replace(config, layer_costs="computed")
    assert minipar.run(cut_by_measurement, computed, world_size=2) == [[["0", "1", "2"]], [["3"]]]


def test_measuring_layers_keeps_the_numbers_of_one_process():
    result = verify(replace(VERIFY_DEFAULTS, pp=2, tp=2, microbatches=2, layer_costs="measured"))
    assert result.equal, table(result)
