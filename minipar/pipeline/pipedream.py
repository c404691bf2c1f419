"""Asynchronous PipeDream: no flush and so no bubble, but gradients of stale weights.

Each stage updates its weights after every backward, while later microbatches, whose forwards used the old
weights, are under way. Weight stashing keeps the old weights for their backwards. Here a microbatch is a
minibatch: the weights are updated after each. The synchronous schedules avoid the staleness that this module shows.

Source: PipeDream, SOSP 2019, arXiv:1806.03377, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.simulate import simulate

Weights = dict[str, Tensor]


class Versions(NamedTuple):
    """The weights that one minibatch's forward and update find on a stage, counted in updates since the start."""

    forward: int
    update: int

    @property
    def staleness(self) -> int:
        """The number of updates between the weights of the gradient and the weights it is applied to."""
        return self.update - self.forward


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], Versions]:
    """Return (stage, minibatch) -> versions, if every stage updates its weights right after each of its backwards.

    Under 1F1B's order on p ranks, staleness(stage s, minibatch k) = min(p-1-s, k).
    """
    versions: dict[tuple[int, int], Versions] = {}
    for actions in schedule.actions:
        updates = dict.fromkeys(range(schedule.num_stages), 0)
        seen: dict[tuple[int, int], int] = {}
        for op, stage, k in actions:
            if op == "F":
                seen[stage, k] = updates[stage]
            elif op in "BW":
                versions[stage, k] = Versions(seen[stage, k], updates[stage])
                updates[stage] += 1
    return versions


def train_asynchronously(
    stages: Sequence[nn.Module],
    minibatches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    stash: bool = True,
) -> list[Tensor]:
    """Train `stages` in place by SGD as PipeDream's pipeline would, in one process; return each minibatch's loss.

    With p stages and version t of stage s written w_s(t), minibatch t makes the update

        w_s(t+1) = w_s(t) - lr * grad_s loss(w_0(t-p+1), w_1(t-p+2), ..., w_p-1(t))      versions below 0 are 0

    stash=False   a backward recomputes its forward from the saved input with the current weights: then even this
                  equation fails, because the update is not the gradient of any loss

    Keeps p-s versions of stage s's weights. Only weights are versioned: stages should have no buffers.
    """
    pipeline = [_AsynchronousStage(stage, lr, stash) for stage in stages]
    spans = simulate(one_f_one_b(len(stages), len(minibatches))).spans
    values: dict[Action, Tensor] = {}
    losses = []
    for op, s, k in sorted(spans, key=lambda action: spans[action]):
        if op == "F":
            x = minibatches[k][0] if s == 0 else values.pop(Action("F", s - 1, k))
            values[Action("F", s, k)] = pipeline[s].forward(k, x)
            continue
        if s == len(stages) - 1:
            y = values.pop(Action("F", s, k)).requires_grad_()
            loss = loss_fn(y, minibatches[k][1])
            losses.append(loss.detach())
            (dy,) = torch.autograd.grad(loss, y)
        else:
            dy = values.pop(Action("B", s + 1, k))
        values[Action("B", s, k)] = pipeline[s].backward_and_step(k, dy)
    for stage in pipeline:
        stage.write_back()
    return losses


class _AsynchronousStage:
    def __init__(self, module: nn.Module, lr: float, stash: bool):
        self.module, self.lr, self.stash = module, lr, stash
        self.weights: Weights = {name: w.detach().clone() for name, w in module.named_parameters()}
        self.kept: dict[int, tuple[Tensor, Weights]] = {}

    def forward(self, k: int, x: Tensor) -> Tensor:
        self.kept[k] = (x, self.weights)
        with torch.no_grad():
            return functional_call(self.module, self.weights, (x,))

    def backward_and_step(self, k: int, dy: Tensor) -> Tensor | None:
        """Apply minibatch k's weight gradient to the current weights; return the gradient of its input."""
        x, weights = self.kept.pop(k)
        weights = weights if self.stash else self.weights
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        x = x.detach().requires_grad_(x.is_floating_point())
        y = functional_call(self.module, leaves, (x,))
        inputs = [*leaves.values(), *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad(y, inputs, dy)
        # New tensors, never in place: minibatches under way still need the old ones.
        self.weights = {name: w - self.lr * g for (name, w), g in zip(self.weights.items(), gradients)}
        return gradients[-1] if x.requires_grad else None

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self.weights[name])
