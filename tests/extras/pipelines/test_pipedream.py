"""Asynchronous PipeDream and its kin: how stale each stage's gradients are, and what each method makes of that."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call

from minipar.extras.pipelines.pipedream import train_asynchronously, weight_versions
from minipar.schedules.one_f_one_b import one_f_one_b
from tests.examples import examples
from tests.strategies import assert_equal_to, seeds


def tiny_stages(p):
    stages = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double() for _ in range(p)]
    return torch.nn.ModuleList(stages)


def tiny_minibatches(m):
    return [
        (torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)) for _ in range(m)
    ]


def delayed_sgd(stages, minibatches, lr):
    """The published update, one minibatch at a time: w_s(t+1) = w_s(t) - lr grad_s loss(w_0(t-p+1), ...)."""
    p = len(stages)
    versions = [[{name: w.detach() for name, w in stage.named_parameters()}] for stage in stages]
    losses = []
    for t, (x, target) in enumerate(minibatches):
        used = [
            {name: w.clone().requires_grad_() for name, w in versions[s][max(0, t - (p - 1 - s))].items()}
            for s in range(p)
        ]
        for stage, weights in zip(stages, used):
            x = functional_call(stage, weights, (x,))
        loss = torch.nn.functional.mse_loss(x, target)
        losses.append(loss.detach())
        loss.backward()
        for s in range(p):
            versions[s].append({name: w - lr * used[s][name].grad for name, w in versions[s][-1].items()})
    return losses, [history[-1] for history in versions]


@given(st.integers(1, 6), st.integers(1, 12))
def test_a_stage_is_as_stale_as_it_has_stages_after_it(p, m):
    versions = weight_versions(one_f_one_b(p, m))
    assert {place: v.staleness for place, v in versions.items()} == {
        (s, k): min(p - 1 - s, k) for s in range(p) for k in range(m)
    }
    assert all(version.update == k for (_, k), version in versions.items())


@examples(15)
@given(st.integers(1, 4), st.integers(1, 8), seeds)
def test_with_stashing_it_is_gradient_descent_with_delayed_weights(p, m, seed):
    torch.manual_seed(seed)
    stages, minibatches = tiny_stages(p), tiny_minibatches(m)
    want_losses, want = delayed_sgd(copy.deepcopy(stages), minibatches, lr=0.1)
    losses = train_asynchronously(stages, minibatches, torch.nn.functional.mse_loss, lr=0.1)
    assert_equal_to(torch.stack(losses), torch.stack(want_losses))
    for stage, weights in zip(stages, want):
        for name, w in stage.named_parameters():
            assert_equal_to(w.detach(), weights[name], what=name)


def largest_difference(stages, weights):
    return max(
        (w - ws[name]).abs().max()
        for stage, ws in zip(stages, weights)
        for name, w in stage.named_parameters()
    )


def test_without_stashing_it_is_the_gradient_of_no_loss():
    torch.manual_seed(0)
    stages, minibatches = tiny_stages(3), tiny_minibatches(8)
    _, want = delayed_sgd(copy.deepcopy(stages), minibatches, lr=0.1)
    train_asynchronously(stages, minibatches, torch.nn.functional.mse_loss, lr=0.1, method="latest")
    assert largest_difference(stages, want) > 1e-4


def test_one_stage_is_plain_gradient_descent_and_two_are_not():
    """Staleness begins with the second stage: the same model cut in two ends elsewhere."""
    torch.manual_seed(0)
    stages, minibatches = tiny_stages(2), tiny_minibatches(6)
    whole = torch.nn.Sequential(*copy.deepcopy(stages))
    one_by_one = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(one_by_one.parameters(), lr=0.1)
    for x, target in minibatches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(one_by_one(x), target).backward()
        optimizer.step()
    train_asynchronously([whole], minibatches, torch.nn.functional.mse_loss, lr=0.1)
    for w, want in zip(whole.parameters(), one_by_one.parameters()):
        assert_equal_to(w.detach(), want.detach())
    train_asynchronously(stages, minibatches, torch.nn.functional.mse_loss, lr=0.1)
    difference = max((a - b).abs().max() for a, b in zip(stages.parameters(), whole.parameters()))
    assert difference > 1e-4


def delayed_by_one(model, microbatches, lr, period, momentum):
    """The update of PipeDream-2BW on the whole model: w(t+1) = w(t) - lr * mean gradient at w(t-1)."""
    versions = [{name: w.detach() for name, w in model.named_parameters()}]
    velocity = {name: torch.zeros_like(w) for name, w in versions[0].items()}
    losses = []
    for t in range(len(microbatches) // period):
        used = {name: w.clone().requires_grad_() for name, w in versions[max(0, t - 1)].items()}
        for x, target in microbatches[t * period : (t + 1) * period]:
            loss = torch.nn.functional.mse_loss(functional_call(model, used, (x,)), target)
            losses.append(loss.detach())
            (loss / period).backward()
        velocity = {name: momentum * v + used[name].grad for name, v in velocity.items()}
        versions.append({name: w - lr * velocity[name] for name, w in versions[-1].items()})
    return losses, versions[-1]


@examples(10)
@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 4), st.sampled_from([0.0, 0.9]), seeds)
def test_2bw_is_gradient_descent_delayed_by_one_on_every_stage(p, more, updates, momentum, seed):
    torch.manual_seed(seed)
    period = p + more
    stages, microbatches = tiny_stages(p), tiny_minibatches(period * updates)
    whole = torch.nn.Sequential(*copy.deepcopy(stages))
    want_losses, want = delayed_by_one(whole, microbatches, 0.1, period, momentum)
    losses = train_asynchronously(
        stages, microbatches, torch.nn.functional.mse_loss, 0.1, "2bw", momentum, period
    )
    assert_equal_to(torch.stack(losses), torch.stack(want_losses))
    for name, w in torch.nn.Sequential(*stages).named_parameters():
        assert_equal_to(w.detach(), want[name], what=name)


def delayed_adam(stages, minibatches, lr, betas, predicted):
    """By torch's Adam: each stage's gradient at its weights of so many updates before, moved ahead by Adam's direction."""
    p = len(stages)
    optimizers = [torch.optim.Adam(stage.parameters(), lr=lr, betas=betas) for stage in stages]
    used = [[] for _ in stages]  # by stage, the weights of each microbatch's forward

    def weights_ahead(s, num_updates):
        found = {}
        for name, w in stages[s].named_parameters():
            state, ahead = optimizers[s].state[w], torch.zeros_like(w)
            if state and predicted:
                m = state["exp_avg"] / (1 - betas[0] ** state["step"].item())
                v = state["exp_avg_sq"] / (1 - betas[1] ** state["step"].item())
                ahead = lr * num_updates * m / (v.sqrt() + 1e-8)
            found[name] = (w.detach() - ahead).requires_grad_()
        return found

    losses = []
    for t, (x, target) in enumerate(minibatches):
        for s in range(p):  # the forward of microbatch k comes after update k - min(k, p-1-s)
            for k in range(len(used[s]), len(minibatches)):
                if k - min(k, p - 1 - s) > t:
                    break
                used[s].append(weights_ahead(s, min(k, p - 1 - s)))
        for s, stage in enumerate(stages):
            x = functional_call(stage, used[s][t], (x,))
        loss = torch.nn.functional.mse_loss(x, target)
        losses.append(loss.detach())
        loss.backward()
        for s, optimizer in enumerate(optimizers):
            for name, w in stages[s].named_parameters():
                w.grad = used[s][t][name].grad
            optimizer.step()
    return losses


@examples(15)
@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from(["stashed", "predicted"]), seeds)
def test_with_adam_it_is_adam_at_delayed_or_predicted_weights(p, m, method, seed):
    torch.manual_seed(seed)
    stages, minibatches = tiny_stages(p), tiny_minibatches(m)
    want, betas = copy.deepcopy(stages), (0.9, 0.95)
    want_losses = delayed_adam(want, minibatches, 0.01, betas, method == "predicted")
    losses = train_asynchronously(
        stages, minibatches, torch.nn.functional.mse_loss, 0.01, method, betas=betas
    )
    assert_equal_to(torch.stack(losses), torch.stack(want_losses))
    for got, weights in zip(stages.parameters(), want.parameters()):
        assert_equal_to(got.detach(), weights.detach())


def distances(method: str, momentum: float, betas=None, lr: float = 0.02) -> torch.Tensor:
    """The mean distance of the first stage's weights of a gradient from those it is applied to."""
    torch.manual_seed(0)
    stages, found = tiny_stages(4), []

    def on_update(stage, used, fresh):
        if stage == 0:
            found.append(sum((used[name] - fresh[name]).square().sum() for name in used).sqrt())

    one = tiny_minibatches(1) * 40  # one problem, so that the momentum points somewhere
    train_asynchronously(
        stages, one, torch.nn.functional.mse_loss, lr, method, momentum, on_update=on_update, betas=betas
    )
    return torch.stack(found[8:]).mean()


def test_predicted_weights_are_nearer_fresh_than_stashed_ones():
    assert distances("predicted", 0.9) < 0.5 * distances("stashed", 0.9)
    assert distances("latest", 0.9) == 0  # but its gradient is that of no loss
    adam = {"momentum": 0.0, "betas": (0.9, 0.95), "lr": 0.002}
    assert distances("predicted", **adam) < 0.5 * distances("stashed", **adam)


def test_a_prediction_without_any_momentum_yet_is_the_stashed_weights():
    torch.manual_seed(0)
    microbatches = tiny_minibatches(3)
    ends = []
    for method in ("predicted", "stashed"):
        torch.manual_seed(1)
        stages = tiny_stages(3)
        ends.append(train_asynchronously(stages, microbatches, torch.nn.functional.mse_loss, 0.1, method))
    assert_equal_to(torch.stack(ends[0][:1]), torch.stack(ends[1][:1]))
    assert not torch.equal(ends[0][2], ends[1][2])


def test_what_cannot_be_is_refused():
    torch.manual_seed(0)
    stages, microbatches = tiny_stages(3), tiny_minibatches(3)
    train = train_asynchronously
    with pytest.raises(ValueError, match="method='stash' is unknown; use .* did you mean stashed"):
        train(stages, microbatches, torch.nn.functional.mse_loss, 0.1, "stash")
    with pytest.raises(ValueError, match="period=2 with method='2bw' on 3 stages; use 2bw, and 3 or more"):
        train(stages, microbatches, torch.nn.functional.mse_loss, 0.1, "2bw", period=2)
    with pytest.raises(ValueError, match="betas=.* are Adam's, which has momentum=0.9 in the first"):
        train(stages, microbatches, torch.nn.functional.mse_loss, 0.1, momentum=0.9, betas=(0.9, 0.95))
    with pytest.raises(ValueError, match="period=4 with method='stashed'"):
        train(stages, microbatches, torch.nn.functional.mse_loss, 0.1, "stashed", period=4)
