"""The reference of a run: the unmodified model, a torch optimizer and a plain loop, in one process on one thread.

In half precision it is the plain loop of mixed precision: the model computes in `config.dtype`; gradients of float32 master
weights are clipped, the master weights are updated, and rounded to become the model's weights again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.config.train_config import TrainConfig
from minipar.model import set_num_groups, update_balance_bias
from minipar.train.checkpoint.initial_weights import whole_model
from minipar.train.data.text import Text, batch_of
from minipar.train.optim import BETAS, OptimizerFamily, make_scaler, may_step, set_learning_rate

Observe = Callable[[dict[str, Tensor]], None]
# A tensor whose entries are all below this is zero up to float64 rounding; differences from such a tensor are absolute.
FLOOR = 1e-12


class ReferenceRun(NamedTuple):
    """The first steps of a run: losses, gradient norms, and the final value of every parameter or its master weight."""

    losses: list[float]
    grad_norms: list[float]
    parameters: Mapping[str, Tensor]


def train_in_one_process(
    config: TrainConfig,
    text: Text,
    steps: int,
    on_step: Callable[[int], None] | None = None,
    observe: Observe | None = None,
    device: torch.device | str = "cpu",
) -> ReferenceRun:
    """Run the first `steps` steps of the run in this process, without a Comm, a wrapper or a mesh.

    observe  called with the master weights by name before the first step, and each time their gradients are complete,
             before they are clipped
    device   where it computes. On a GPU the rotary angles' float32 cosines differ from a CPU's in the last bit

    Raises NotFinite if the loss or the gradient norm is not finite and on_nan is "stop".
    """
    model = whole_model(config).to(device)
    weights = dict(model.named_parameters())
    masters = {
        n: p.detach().float().requires_grad_() if config.mixed_precision else p for n, p in weights.items()
    }
    family: OptimizerFamily = config.choice("optimizer").load()
    groups = family.groups(masters.items(), config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "betas": BETAS}
    averaging = config.choice("compress").load()(config)
    optimizer = averaging.in_one_process(family.optimizer_class()(groups, **options))
    scaler = make_scaler(config)
    losses, norms = [], []
    observe = observe or (lambda masters: None)
    observe(masters)
    for step in range(steps):
        set_learning_rate(config, optimizer, step)
        batch = batch_of(config, text, step)
        model.zero_grad()
        scale = 1.0 if scaler is None else scaler.current_scale
        set_num_groups(model, None, scale)
        loss = model.loss(*batch.on(device), step=step)
        (loss * scale).backward()
        for name, p in weights.items():
            if p is not masters[name] and p.grad is not None:
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
    return ReferenceRun(losses, norms, {name: p.detach().cpu() for name, p in masters.items()})


class Difference(NamedTuple):
    """The largest differences between two runs: in loss, in gradient norm (relative), and in the parameter `worst`."""

    steps: int
    loss: float
    grad_norm: float
    parameter: float
    worst: str

    def __str__(self) -> str:
        return (
            f"first {self.steps} steps against one process: largest difference in loss {self.loss:.1e}, "
            f"in gradient norm {self.grad_norm:.1e} of it, in a parameter {self.parameter:.1e} ({self.worst})"
        )


def compare(run: ReferenceRun, reference: ReferenceRun) -> Difference:
    """Return the largest differences between two runs; a difference is inf if either value is nan."""
    if run.parameters.keys() != reference.parameters.keys():
        raise ValueError(
            f"different parameters: {sorted(run.parameters.keys() ^ reference.parameters.keys())}"
        )
    apart = {
        name: known((run.parameters[name].double() - reference.parameters[name].double()).abs().max().item())
        for name in reference.parameters
    }
    worst = max(apart, key=lambda name: apart[name])
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
    """Return a difference divided by `largest`, the reference's largest entry; undivided if that entry is 0."""
    return known(apart / largest if largest > FLOOR else apart)


def known(difference: float) -> float:
    """Return the difference, or inf if it is nan: nan differs infinitely from everything, even from nan."""
    return math.inf if math.isnan(difference) else difference
