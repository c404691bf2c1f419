"""The reference of a run: the unmodified model, a torch optimizer and a plain loop, in one process on one thread."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minipar.model import Transformer, update_balance_bias
from minipar.train.optim import BETAS, learning_rate, parameter_groups
from minipar.train.text import batch_of_step
from minipar.train.train_config import TrainConfig


class ReferenceRun(NamedTuple):
    """The first steps of a run: its losses, gradient norms, and every parameter at their end."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]


def train_in_one_process(
    config: TrainConfig, text: torch.Tensor, steps: int, on_step=None, observe=None
) -> ReferenceRun:
    """Run the first `steps` steps of the run in this process, without a Comm, a wrapper or a mesh.

    observe  called with the model before the first step, and each time gradients are complete, before they are clipped
    """
    model = Transformer(config.model, seed=config.seed, dtype=config.torch_dtype)
    groups = parameter_groups(model.named_parameters(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS)
    losses, norms = [], []
    observe = observe or (lambda model: None)
    observe(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.lr, config.warmup)
        batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len)
        optimizer.zero_grad()
        loss = model.loss(batch.tokens, batch.targets, step=step)
        loss.backward()
        observe(model)
        largest = config.grad_clip or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), largest).item())
        optimizer.step()
        if config.model.balance_bias:
            update_balance_bias(model)
        losses.append(loss.item())
        if on_step is not None:
            on_step(step)
    return ReferenceRun(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


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
    if run.parameters.keys() != reference.parameters.keys():
        raise ValueError(
            f"different parameters: {sorted(run.parameters.keys() ^ reference.parameters.keys())}"
        )
    apart = {
        name: (run.parameters[name].double() - reference.parameters[name].double()).abs().max().item()
        for name in reference.parameters
    }
    worst = max(apart, key=apart.get)
    return Difference(
        len(reference.losses),
        max(abs(a - b) for a, b in zip(run.losses, reference.losses)),
        max(abs(a - b) / b for a, b in zip(run.grad_norms, reference.grad_norms)),
        apart[worst],
        worst,
    )
