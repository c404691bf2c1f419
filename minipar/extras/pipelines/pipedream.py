"""PipeDream and other asynchronous pipelines: without a flush there is no bubble, but gradients use stale weights.

Each stage updates its weights while later microbatches, whose forwards used the old weights, are under way. The methods
differ in the weights that a microbatch's forward and backward use:

    latest      the forward and the backward each use the newest weights when they run; the backward's weights are newer
                than the forward's, so its result is not a gradient
    stashed     PipeDream: the backward uses the forward's weights; stage s keeps p-s versions for this
    2bw         PipeDream-2BW: both use the version before the newest, with an update every p or more microbatches; a stage
                keeps 2 versions
    predicted   SpecTrain: both use the weights that momentum predicts for the update; stage s keeps p-s versions.
                PipeOptim: the same with the optimizer's own direction, here Adam's

Sources: PipeDream, SOSP 2019, arXiv:1806.03377, section 3.3; PipeDream-2BW, arXiv:2006.09503, section 3.1; SpecTrain,
arXiv:1809.02839, section 3; PipeOptim, arXiv:2312.00839, of which the abstract and the authors' code (guanleics/PipeOptim)
were read: that code predicts one update further ahead, past the microbatch's own update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minipar.schedules.one_f_one_b import one_f_one_b
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.simulate import simulate
from minipar.support.errors import one_of

Weights = dict[str, Tensor]
OnUpdate = Callable[[int, Weights, Weights], None]
Method = Literal["latest", "stashed", "2bw", "predicted"]
METHODS = ("latest", "stashed", "2bw", "predicted")


class Versions(NamedTuple):
    """The versions of a stage's weights at a microbatch's forward and at its update. Version n is after n updates."""

    forward: int
    update: int

    @property
    def staleness(self) -> int:
        """The number of updates between the forward's weights and the weights to which the gradient is applied."""
        return self.update - self.forward


def weight_versions(schedule: Schedule) -> dict[tuple[int, int], Versions]:
    """Return (stage, microbatch) -> versions, for stages that update their weights right after each backward.

    Under 1F1B's order on p ranks, staleness(stage s, microbatch k) = min(p-1-s, k).
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
    microbatches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    method: Method = "stashed",
    momentum: float = 0.0,
    period: int | None = None,
    on_update: OnUpdate | None = None,
    betas: tuple[float, float] | None = None,
) -> list[Tensor]:
    """Train `stages` in place by SGD or Adam in one process, with an asynchronous pipeline's updates; return each loss.

    There are p stages; w_s(t) is version t of stage s, and a version below 0 means version 0. For example,

        stashed   w_s(t+1) = w_s(t) - lr * grad_s loss_t(w_0(t-p+1), w_1(t-p+2), ..., w_p-1(t))
        2bw       w(t+1)   = w(t) - lr * mean of grad loss_k(w(t-1)) over the `period` microbatches k of update t
        predicted the forward of a microbatch that is n updates stale uses w(t) - n * lr * direction(t)

    momentum    direction = v = momentum * v + gradient, and lr * v is subtracted in place of lr * gradient
    betas       Adam's, in place of momentum: direction = m_hat / (sqrt(v_hat) + 1e-8)
    period      with 2bw, microbatches per update, at least p (default: p); other methods update after every microbatch
    on_update   called with (stage, the weights of the backward, the weights to which the gradient is applied)

    Only weights are versioned: stages should have no buffers.
    Raises ValueError for an unknown method, a period with a method other than 2bw, a period below p, or both momentum and
    betas.
    """
    p = len(stages)
    _check_method(method, period, p, momentum, betas)
    schedule = one_f_one_b(p, len(microbatches))
    every = (period or p) if method == "2bw" else 1
    stale = weight_versions(schedule)
    pipeline = [
        _VersionedStage(
            s,
            module,
            method,
            lr,
            _Momentum(momentum) if betas is None else _Adam(*betas),
            every,
            [stale[s, k].staleness for k in range(len(microbatches))],
            on_update,
        )
        for s, module in enumerate(stages)
    ]
    spans = simulate(schedule).spans
    values: dict[Action, Tensor] = {}
    losses = []
    for op, s, k in sorted(spans, key=lambda action: spans[action]):
        if op == "F":
            x = microbatches[k][0] if s == 0 else values.pop(Action("F", s - 1, k))
            values[Action("F", s, k)] = pipeline[s].forward(k, x)
            continue
        if s == p - 1:
            y = values.pop(Action("F", s, k)).requires_grad_()
            loss = loss_fn(y, microbatches[k][1])
            losses.append(loss.detach())
            (dy,) = torch.autograd.grad(loss, y)
        else:
            dy = values.pop(Action("B", s + 1, k))
        dx = pipeline[s].backward(k, dy)
        if dx is not None:
            values[Action("B", s, k)] = dx
    for stage in pipeline:
        stage.write_back()
    return losses


def _check_method(
    method: Method, period: int | None, p: int, momentum: float, betas: tuple[float, float] | None
) -> None:
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use {one_of(METHODS, near=method)}")
    if period is not None and (method != "2bw" or period < p):
        raise ValueError(f"period={period} with method={method!r} on {p} stages; use 2bw, and {p} or more")
    if betas is not None and momentum:
        raise ValueError(
            f"betas={betas} are Adam's, which has momentum={momentum} in the first; use momentum=0"
        )


class _Direction(Protocol):
    """The direction of an optimizer's updates: what an update subtracts, divided by the learning rate.

    last  the direction of the last update; {} before the first
    """

    last: Weights

    def update(self, gradient: Weights) -> Weights: ...


class _Momentum:
    def __init__(self, momentum: float):
        self.momentum = momentum
        self.last: Weights = {}

    def update(self, gradient: Weights) -> Weights:
        before = self.last or {name: torch.zeros_like(g) for name, g in gradient.items()}
        self.last = {name: self.momentum * before[name] + g for name, g in gradient.items()}
        return self.last


class _Adam:
    def __init__(self, beta1: float, beta2: float):
        self.beta1, self.beta2, self.num_updates = beta1, beta2, 0
        self.last: Weights = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def update(self, gradient: Weights) -> Weights:
        self.num_updates += 1
        corrections = 1 - self.beta1**self.num_updates, 1 - self.beta2**self.num_updates
        for name, g in gradient.items():
            m, v = self.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            m, v = self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g * g
            self.moments[name] = m, v
            self.last[name] = m / corrections[0] / ((v / corrections[1]).sqrt() + 1e-8)
        return self.last


class _VersionedStage:
    """A stage with versions of its weights: `history[-1]` is the newest, `kept[k]` is microbatch k's (input, weights)."""

    def __init__(
        self, number: int, module: nn.Module, method: Method, lr: float, direction: _Direction, every: int,
        staleness: Sequence[int], on_update: OnUpdate | None,
    ):  # fmt: skip
        self.number, self.module, self.method, self.lr, self.direction = number, module, method, lr, direction
        self.every, self.staleness, self.on_update = every, staleness, on_update
        self.history: list[Weights] = [{name: w.detach().clone() for name, w in module.named_parameters()}]
        self.total: Weights = {}
        self.updates = 0
        self.kept: dict[int, tuple[Tensor, Weights]] = {}

    def forward(self, k: int, x: Tensor) -> Tensor:
        weights = self._weights_of(k)
        self.kept[k] = (x, weights)
        with torch.no_grad():
            y: Tensor = functional_call(self.module, weights, (x,))
        return y

    def _weights_of(self, k: int) -> Weights:
        newest = self.history[-1]
        if self.method == "2bw":
            # The same version on every stage, although early stages have made fewer updates by now.
            version = max(0, k // self.every - 1)
            return self.history[version - self.updates - 1]
        if self.method == "predicted" and self.direction.last:
            ahead = self.lr * self.staleness[k]
            return {name: w - ahead * self.direction.last[name] for name, w in newest.items()}
        return newest

    def backward(self, k: int, dy: Tensor) -> Tensor | None:
        """Add microbatch k's gradient, update the weights if a period ends, and return the gradient of k's input."""
        x, weights = self.kept.pop(k)
        weights = self.history[-1] if self.method == "latest" else weights
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        x = x.detach().requires_grad_(x.is_floating_point())
        y = functional_call(self.module, leaves, (x,))
        inputs = [*leaves.values(), *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad(y, inputs, dy)
        for name, gradient in zip(weights, gradients):
            self.total[name] = self.total[name] + gradient if name in self.total else gradient
        if (k + 1) % self.every == 0:
            self._update(weights)
        return gradients[-1] if x.requires_grad else None

    def _update(self, used: Weights) -> None:
        if self.on_update:
            self.on_update(self.number, used, self.history[-1])
        direction = self.direction.update({name: total / self.every for name, total in self.total.items()})
        # New tensors, never in place: microbatches under way still need the old ones.
        new = {name: w - self.lr * direction[name] for name, w in self.history[-1].items()}
        self.history = [*self.history[-1:], new]  # `kept` has the older versions that are still needed
        self.total, self.updates = {}, self.updates + 1

    @torch.no_grad()
    def write_back(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self.history[-1][name])
