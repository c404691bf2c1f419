"""The reference of a run: the unmodified model, a torch optimizer and a plain loop, in one process on one thread.

In half precision it is mixed precision's plain loop: the model computes in `config.dtype`, and its float32 master weights
are clipped and updated, then rounded to be the model's again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from minipar.data_parallel.loss_scaler import DynamicLossScaler
from minipar.model import set_num_groups, update_balance_bias
from minipar.train.initial_weights import whole_model
from minipar.train.optim import BETAS, learning_rate, optimizer_class, parameter_groups
from minipar.train.text import batch_of_step
from minipar.train.train_config import TrainConfig

FLOOR = 1e-12  # what has no larger entry is zero up to float64 rounding: differences from it are absolute


class ReferenceRun(NamedTuple):
    """The first steps of a run: its losses, gradient norms, and every parameter (the master weights) at their end."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]


def train_in_one_process(
    config: TrainConfig, text: torch.Tensor, steps: int, on_step=None, observe=None
) -> ReferenceRun:
    """Run the first `steps` steps of the run in this process, without a Comm, a wrapper or a mesh.

    observe  called with the master weights by name before the first step, and each time their gradients are complete,
             before they are clipped

    Raises ArithmeticError where the loss or the gradient norm is not finite and on_nan is "stop".
    """
    model = whole_model(config)
    weights = dict(model.named_parameters())
    masters = {
        n: p.detach().float().requires_grad_() if config.mixed_precision else p for n, p in weights.items()
    }
    groups = parameter_groups(masters.items(), config.weight_decay, config.optimizer)
    optimizer = optimizer_class(config)(groups, lr=config.lr, betas=BETAS)
    scaler = make_scaler(config)
    losses, norms = [], []
    observe = observe or (lambda masters: None)
    observe(masters)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.highest_lr, config.warmup)
        batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len, config.sampling)
        model.zero_grad()
        scale = 1.0 if scaler is None else scaler.current_scale
        set_num_groups(model, None, scale)
        loss = model.loss(batch.tokens, batch.targets, step=step)
        (loss * scale).backward()
        for name, p in weights.items():
            if p is not masters[name]:
                masters[name].grad = p.grad.float() / scale
        observe(masters)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), config.grad_clip or math.inf)
        losses.append(loss.item())
        norms.append(norm.item())
        if may_step(config, step, losses[-1], norms[-1], scaler):
            optimizer.step()
            with torch.no_grad():
                for name, p in weights.items():
                    p.copy_(masters[name])
        if config.model.balance_bias:
            update_balance_bias(model)
        if on_step is not None:
            on_step(step)
    return ReferenceRun(losses, norms, {name: p.detach() for name, p in masters.items()})


def make_scaler(config: TrainConfig, comm=None) -> DynamicLossScaler | None:
    """The loss scale of float16; None for other dtypes. After one overflow it waits for a second before it gets smaller."""
    return DynamicLossScaler(comm, config.loss_scale, hysteresis=2) if config.dtype == "float16" else None


def may_step(
    config: TrainConfig, step: int, loss: float, norm: float, scaler: DynamicLossScaler | None
) -> bool:
    """Whether to update: the loss and the gradient norm are finite. Updates the loss scale.

    Raises ArithmeticError where they are not, unless on_nan is "skip", or a smaller loss scale may mend it.
    """
    finite = math.isfinite(loss) and math.isfinite(norm)
    overflowed = scaler is not None and math.isfinite(loss) and not finite and scaler.current_scale > 1
    if not finite and not overflowed and config.on_nan == "stop":
        raise ArithmeticError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}; "
            "lower lr, or go on without such steps by on_nan=skip"
        )
    if scaler is not None:
        scaler.update(finite)
    return finite


class Difference(NamedTuple):
    """The largest differences between two runs: in loss, in gradient norm (relative), and in the parameter `worst`."""

    steps: int
    loss: float
    grad_norm: float
    parameter: float
    worst: str

    def __str__(self):
        return (
            f"first {self.steps} steps against one process: largest difference in loss {self.loss:.1e}, "
            f"in gradient norm {self.grad_norm:.1e} of it, in a parameter {self.parameter:.1e} ({self.worst})"
        )


def compare(run: ReferenceRun, reference: ReferenceRun) -> Difference:
    """Return the largest differences: inf where one of the two is not a number."""
    if run.parameters.keys() != reference.parameters.keys():
        raise ValueError(
            f"different parameters: {sorted(run.parameters.keys() ^ reference.parameters.keys())}"
        )
    apart = {
        name: known((run.parameters[name].double() - reference.parameters[name].double()).abs().max().item())
        for name in reference.parameters
    }
    worst = max(apart, key=apart.get)
    norms = zip(run.grad_norms, reference.grad_norms)
    return Difference(
        len(reference.losses),
        max(_apart(a, b) for a, b in zip(run.losses, reference.losses)),
        max(relative(_apart(a, b), abs(b)) for a, b in norms),
        apart[worst],
        worst,
    )


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b else known(abs(a - b))  # two gradient norms that overflowed are equal


def relative(apart: float, largest: float) -> float:
    """A difference as a fraction of the largest entry it is a difference from, or itself where that is zero."""
    return known(apart / largest if largest > FLOOR else apart)


def known(difference: float) -> float:
    """The difference, or inf if it is nan: nan differs infinitely from everything, nan included."""
    return math.inf if math.isnan(difference) else difference
