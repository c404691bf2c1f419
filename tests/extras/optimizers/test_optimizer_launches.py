"""An optimizer's step takes as many kernels for many parameters as for few: it works on lists of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.optimizers.lamb import Lamb
from minipar.extras.optimizers.muon import Muon
from minipar.mesh import Mesh
from minipar.train.optim import clip_grad_norm_, grad_norm
from minipar.train.parallelize import parallelize
from minipar.train.step import gradients
from tests.extras.optimizers.launches import Launches

BASE = TrainConfig(
    model=ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=8), seq_len=8, batch_size=2
)
KINDS = {
    "lamb, zero 0": dict(optimizer="lamb"),
    "lamb, zero 0, bfloat16": dict(optimizer="lamb", dtype="bfloat16"),
    "lamb, zero 1": dict(optimizer="lamb", dp=2, zero=1),
    "lamb, zero 2, bfloat16": dict(optimizer="lamb", dp=2, zero=2, dtype="bfloat16"),
    "lamb, zero 1, offload": dict(optimizer="lamb", dp=2, zero=1, offload="cpu"),
    "lamb, zero 3": dict(optimizer="lamb", dp=2, zero=3),
    "lamb, tp": dict(optimizer="lamb", tp=2),
    "muon, zero 0": dict(optimizer="muon"),
    "muon, zero 1": dict(optimizer="muon", dp=2, zero=1),
}  # fmt: skip


def launches_of_a_step(world, config):
    """Kernels of the second update, the norm and the clipping included: the first update makes the states."""
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    for step in range(2):
        state.optimizer.zero_grad()
        gradients(world, state, config, torch.arange(100) % 256, step)
        with Launches() as counted:
            clip_grad_norm_(state.optimizer.tensors, 1.0, world, state.shares)
            grad_norm(state.optimizer.tensors, world, state.shares)
            state.optimizer.step(grad_scale=2.0)
    return counted.count


def of_layers(world, options):
    return [
        launches_of_a_step(world, replace(BASE, model=replace(BASE.model, num_layers=n), **options))
        for n in (2, 6)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_launches_as_many_kernels_for_many_layers_as_for_few(kind):
    world_size = replace(BASE, **KINDS[kind]).world_size
    for few, many in minipar.run(of_layers, KINDS[kind], world_size=world_size, timeout_s=30):
        assert few == many


@pytest.mark.parametrize(
    ("make", "grows"),
    [
        (lambda params: torch.optim.AdamW(params, foreach=False), True),
        (lambda params: torch.optim.AdamW(params, foreach=True), False),
        (lambda params: Lamb(params, lr=0.1), False),
        (Muon, False),
    ],
    ids=["torch, one by one", "torch, lists", "lamb", "muon"],
)
def test_an_update_parameter_by_parameter_is_seen(make, grows):
    counts = []
    for number in (2, 5):
        params = [nn.Parameter(torch.ones(3, 4)) for _ in range(number)]
        optimizer = make(params)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            with Launches() as counted:
                optimizer.step()
        counts.append(counted.count)
    assert (counts[0] < counts[1]) == grows, counts


def test_lists_that_do_not_match_are_counted_one_by_one():
    many = [torch.ones(n) for n in range(2, 7)]
    with Launches() as counted:
        torch._foreach_mul_(many, 2.0)
        torch._foreach_mul_(many, many)
    assert counted.count == 2
    for others in (
        torch.ones(5).unbind(),
        [x.double() for x in many],
        [torch.ones(2 * n)[::2] for n in range(2, 7)],
    ):
        with Launches() as counted:
            torch._foreach_mul_(many, others)
        assert counted.count == 5
