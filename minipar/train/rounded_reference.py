"""One process in half precision, one step at a time from a mesh's own weights: what `verify` compares such a mesh with.

Two runs in half precision drift apart, because Adam makes a whole step of a gradient that is only rounding. So each step
is compared on its own, in what rounding can change and in what it can't:

    gradients   one process computes those of the mesh's weights, in half precision and in float32. The mesh's may differ
                from the former by LIMIT times what those two differ by (tensor by tensor), plus LIMIT units of rounding
    weights     one process updates the mesh's weights by the mesh's gradients, in float32: the mesh has done the same
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minipar.model import set_num_groups, update_balance_bias
from minipar.train.initial_weights import whole_model
from minipar.train.optim import BETAS, learning_rate, optimizer_class, parameter_groups
from minipar.train.reference import make_scaler, may_step, relative
from minipar.train.text import Batch, batch_of_step
from minipar.train.train_config import TrainConfig

LIMIT = 4.0
FLIPPED = (
    0.2  # of a tensor's largest gradient, in a model with experts: rounding changes which experts are chosen
)

Tensors = dict[str, torch.Tensor]


class RoundedStep(NamedTuple):
    """The expected result of a step of the mesh: `limits` are of the gradients by name, and of the loss under "loss".

    norm     of the mesh's own gradients; not finite where they overflowed, and the step was skipped
    weights  after the step
    """

    loss: float
    gradients: Tensors
    limits: dict[str, float]
    norm: float
    weights: Tensors


def is_rounded(config: TrainConfig) -> bool:
    """Whether a mesh rounds more coarsely than the float32, or float64, that its weights are updated in."""
    return config.mixed_precision or config.torch_reduce_dtype.itemsize < config.torch_dtype.itemsize


def follow(
    config: TrainConfig, text: torch.Tensor, weights: list[Tensors], gradients: list[Tensors]
) -> list[RoundedStep]:
    """Return a RoundedStep for each step k of a mesh that has these master weights before it, and these gradients in it."""
    rounded = whole_model(config)
    exact = whole_model(config, config.torch_master_dtype)
    masters = {name: torch.nn.Parameter(w.clone()) for name, w in weights[0].items()}
    groups = parameter_groups(masters.items(), config.weight_decay, config.optimizer)
    optimizer, scaler = optimizer_class(config)(groups, lr=config.lr, betas=BETAS), make_scaler(config)
    unit = max(torch.finfo(dtype).eps for dtype in (config.torch_dtype, config.torch_reduce_dtype))
    steps = []
    for step, (before, of_mesh) in enumerate(zip(weights, gradients)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.highest_lr, config.warmup)
        batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len, config.sampling)
        scale = 1.0 if scaler is None else scaler.current_scale
        loss, own = _gradients(rounded, before, batch, step, scale)
        copies = {name: p.detach() for name, p in rounded.named_parameters()}
        exact_loss, without_rounding = _gradients(exact, copies, batch, step)
        limits = {
            name: LIMIT * (unit + relative((own[name] - x).abs().max().item(), x.abs().max().item()))
            for name, x in without_rounding.items()
        }
        if config.model.num_experts:
            limits = {name: limit + FLIPPED for name, limit in limits.items()}
        limits["loss"] = LIMIT * (unit + relative(abs(loss - exact_loss), abs(exact_loss)))
        for name, master in masters.items():
            master.data.copy_(before[name])
            master.grad = of_mesh[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), config.grad_clip or float("inf")).item()
        if may_step(config, step, loss, norm, scaler):
            optimizer.step()
        if config.model.balance_bias:
            update_balance_bias(rounded)
            exact.load_state_dict({n: b for n, b in rounded.named_buffers()}, strict=False)
        steps.append(
            RoundedStep(loss, own, limits, norm, {n: p.detach().clone() for n, p in masters.items()})
        )
    return steps


def _gradients(model, weights: Tensors, batch: Batch, step: int, scale: float = 1.0) -> tuple[float, Tensors]:
    """The loss of a batch and its gradients, at these weights, which are rounded to the model's dtype."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    model.zero_grad()
    set_num_groups(model, None, scale)
    loss = model.loss(batch.tokens, batch.targets, step=step)
    (loss * scale).backward()
    wide = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    return loss.item(), {name: p.grad.to(wide) / scale for name, p in model.named_parameters()}
