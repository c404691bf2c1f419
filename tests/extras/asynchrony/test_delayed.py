"""Delayed data parallelism: equal to its equation, on every mesh; stopped and resumed; how large a rate it allows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.asynchrony.delayed import DelayedInOneProcess, DelayedOptimizer, largest_stable_rate
from minipar.mesh import Mesh
from minipar.train import train
from minipar.train.data.text import load_data
from minipar.train.parallelize import parallelize
from minipar.train.step import train_step
from minipar.train.verification.verify import table, verify
from tests.examples import examples
from tests.strategies import assert_equal_to

SMALL = ModelConfig(dim=16, num_layers=2, num_heads=2, num_kv_heads=2, max_seq_len=16)
BASE = TrainConfig(
    model=SMALL, batch_size=4, seq_len=16, steps=4, warmup=2, verify_steps=0, trace_steps=0, dtype="float64"
)


def delayed(delay: int, **more) -> TrainConfig:
    return BASE.choosing(compress=("delayed", {"delay": delay}), **more)


# The equation ------------------------------------------------------------------------------------------------------


def loss_of(w: torch.Tensor, step: int) -> torch.Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (torch.tanh(x @ w) - x.sum(1)).square().mean()


def by_equation(w, delay, scales, lr):
    """w(k+1) = w(k) - lr(k) AdamW(g(k - delay)) of the gradients g(k) at w(k), each divided by its own scale."""
    past, updated = [], torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([updated], betas=(0.9, 0.95))
    for step, scale in enumerate(scales):
        at = updated.detach().clone().requires_grad_()
        loss_of(at, step).backward()
        past.append(at.grad / scale)
        if step >= delay:
            updated.grad = past[step - delay]
            optimizer.param_groups[0]["lr"] = lr * (step + 1)
            optimizer.step()
    return updated.detach()


@examples(25)
@given(st.integers(0, 4), st.lists(st.floats(0.5, 3), max_size=8), st.integers(0, 99))
def test_it_is_the_delayed_equation(delay, scales, seed):
    w = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours, reference = torch.nn.Parameter(w.clone()), torch.nn.Parameter(w.clone())
    optimizer = DelayedOptimizer(torch.optim.AdamW([ours], betas=(0.9, 0.95)), delay)
    in_one = DelayedInOneProcess(torch.optim.AdamW([reference], betas=(0.9, 0.95)), delay)
    for step, scale in enumerate(scales):
        for param, own in ((ours, optimizer), (reference, in_one)):
            own.param_groups[0]["lr"] = 0.01 * (step + 1)
            param.grad = None
            loss_of(param, step).backward()
        optimizer.step(grad_scale=scale)
        reference.grad /= scale
        in_one.step()
    want = by_equation(w, delay, scales, 0.01)
    assert_equal_to(ours.detach(), want)
    assert_equal_to(reference.detach(), want)
    assert len(optimizer.waiting) == min(delay, len(scales)), "copies of the gradients"


MESHES = [
    dict(dp=2),
    dict(dp=2, pp=2, microbatches=2, model=replace(SMALL, tie_embeddings=True)),
    dict(dp=2, tp=2, zero=3, grad_clip=0.01),
    dict(dp=2, cp=2, ep=2, model=replace(SMALL, num_experts=4, top_k=2, group_tokens=4)),
    dict(dp=2, optimizer="lamb"),
    dict(dp=2, optimizer="muon"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: ",".join(mesh))
def test_every_mesh_is_equal_to_the_delayed_run_of_one_process(mesh):
    result = verify(delayed(2, **mesh))
    assert result.equal, table(result)


def run(world, config, text):
    state = parallelize(config, Mesh(world, **config.mesh_sizes), world.device)
    losses = [train_step(world, state, config, text, step)["loss"] for step in range(config.steps)]
    return losses, [p.detach() for stage in state.stages for p in stage.parameters()]


def test_without_delay_it_is_ddp_bit_for_bit():
    plain = BASE.choosing(dp=2, grad_clip=0.01)
    text, runs = load_data(BASE)[0], {}
    for name, config in (
        (None, plain),
        (0, delayed(0, dp=2, grad_clip=0.01)),
        (1, delayed(1, dp=2, grad_clip=0.01)),
    ):
        runs[name] = minipar.run(run, config, text, world_size=2)
    for (losses, params), (wanted, parameters) in zip(runs[0], runs[None]):
        assert losses == wanted
        assert all(torch.equal(a, b) for a, b in zip(params, parameters))
    assert runs[1][0][0][:2] == [runs[None][0][0][0], runs[1][1][0][1]]
    assert runs[1][0][0][2] != runs[None][0][0][2]


# Planted faults ----------------------------------------------------------------------------------------------------


def one_too_early(self, *, grad_scale=1.0):
    self.delay = 1
    kept_step(self, grad_scale=grad_scale)


def steps_with_nothing(self, *, grad_scale=1.0):
    """Until the first gradient arrives, step with zeros: weights decay, and Adam counts."""
    if len(self.waiting) < self.delay:
        self.waiting.append([torch.zeros_like(p) for p in self.tensors])
    kept_step(self, grad_scale=grad_scale)


def clipped_when_applied(self, *, grad_scale=1.0):
    """Divide by the scale of the step in which a gradient is applied, not of its own."""
    self.waiting.append([None if p.grad is None else p.grad.clone() for p in self.tensors])
    if len(self.waiting) > self.delay:
        for param, gradient in zip(self.tensors, self.waiting.popleft()):
            param.grad = None if gradient is None else gradient / grad_scale
        self.optimizer.step()


kept_step = DelayedOptimizer.step


@pytest.mark.parametrize("fault", [one_too_early, steps_with_nothing, clipped_when_applied, kept_step])
def test_faults_are_noticed(fault):
    def faulty(world, config, text):
        DelayedOptimizer.step = fault
        try:
            return run(world, config, text)
        finally:
            DelayedOptimizer.step = kept_step

    config = delayed(2, dp=2, grad_clip=0.3)
    text = load_data(config)[0]
    (losses, _), _ = minipar.run(faulty, config, text, world_size=2)
    wanted = minipar.run(run, replace(config, dp=1), text, world_size=1)[0][0]
    equal = losses == pytest.approx(wanted, rel=1e-10)
    assert equal == (fault is kept_step)


# Stopped and resumed -----------------------------------------------------------------------------------------------


def losses_of(config) -> list[float]:
    return [line["loss"] for line in train(config).metrics]


@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_resumed_run_applies_what_waited_on_any_mesh(at, tmp_path):
    """Step 1 comes before any gradient is applied."""
    model = replace(SMALL, tie_embeddings=True)
    config = delayed(2, dp=2, model=model, out=tmp_path / "whole", checkpoint_every=at, keep=0)
    whole = losses_of(config)
    for path in (tmp_path / "whole" / "checkpoints").iterdir():
        if int(path.name.split("-")[1]) > at:
            path.rename(tmp_path / path.name)
    for mesh in [dict(dp=1, pp=2, zero=3, microbatches=2), {}][:at]:
        other = config.choosing(**mesh, resume=tmp_path / "whole", out=tmp_path / str(len(mesh)))
        assert losses_of(other) == pytest.approx(whole[at:], rel=1e-10)
    for change, words in (
        (("delayed", {"delay": 1}), "compress.delay=1, but .* with compress.delay=2, and the state"),
        ("none", "compress=none, but .* with compress=delayed"),
    ):
        with pytest.raises(ValueError, match=words):
            train(config.choosing(compress=change, resume=tmp_path / "whole", out=tmp_path / "new"))


REFUSED = [
    (dict(compress=("delayed", {"delay": -1})), "compress.delay=-1 is out of range; use 0 or more"),
    (dict(zero=1), "with zero=1 the optimizer reduces them; use zero=0 or 3"),
    (dict(dtype="bfloat16"), "dtype=bfloat16 needs them; use float32"),
    (dict(zero=3, offload="cpu"), "offload=cpu moves these away; use offload=none"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        BASE.choosing(**({"dp": 2, "compress": "delayed"} | options))


# Stability ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1, 2, 6])
def test_a_quadratic_is_stable_up_to_the_rate_of_the_formula(delay):
    """By gradient descent on w^2 / 2, whose largest rate without delay is 2."""

    def ends(rate: float) -> float:
        w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = DelayedOptimizer(torch.optim.SGD([w], lr=rate), delay)
        for _ in range(900):
            w.grad = w.detach().clone()
            optimizer.step()
        return abs(w.item())

    limit = 2 * largest_stable_rate(delay)
    assert ends(0.96 * limit) < 0.5 < 2 < ends(1.04 * limit)
    assert [largest_stable_rate(d) for d in (0, 1)] == pytest.approx([1, 0.5])
