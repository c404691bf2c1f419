"""The reference of a mesh in half precision: one process that computes each step from the mesh's own weights.

Two runs in half precision drift apart, because Adam takes a full-size step even for a gradient that is only rounding
error. So each step is compared separately:

    gradients   one process computes gradients at the mesh's weights, in float32, and in half precision: microbatch by
                microbatch, added in the dtype in which the mesh has to add them. For each tensor, the mesh's gradient
                may differ from the half-precision one by a few times (the difference between these two + a rounding unit)
    weights     one process updates the mesh's weights by the mesh's gradients, in float32; the results must be equal
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import NamedTuple

import torch

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.mesh import Placement, gather
from minipar.model import Transformer, set_num_groups, update_balance_bias
from minipar.train.checkpoint.initial_weights import whole_model
from minipar.train.data.text import Batch, Text, batch_of
from minipar.train.optim import BETAS, make_scaler, may_step, set_learning_rate
from minipar.train.reference import relative

TOLERANCE = {"float64": 1e-9, "float32": 2e-3}  # relative to a tensor's largest entry
# A right mesh differs by less than 1 of these units; 64 microbatches whose gradients are added in bfloat16, by more than 2.
LIMIT = 1.5
CUT_LIMIT = 4.0  # under tp and cp, which round parts of a product, and add these
# The additional difference allowed in a model with experts, as a fraction of a tensor's largest gradient, since rounding
# may change the routing.
FLIPPED = 0.2

Tensors = dict[str, torch.Tensor]
Held = list[tuple[Placement, torch.Tensor]]  # a rank's parts of tensors


class RoundedStep(NamedTuple):
    """The expected result of a step of the mesh.

    limits   the allowed differences of gradients, by name, and of the loss, under "loss"
    norm     the norm of the mesh's own gradients; not finite if they overflowed and the step was skipped
    weights  the weights after the step
    """

    loss: float
    gradients: Tensors
    limits: dict[str, float]
    norm: float
    weights: Tensors


def whole(held_by_rank: list[Held]) -> Tensors:
    """Return the unsharded tensors by name. If several ranks hold the same part, the first rank's copy is used."""
    parts: dict[str, Held] = {}
    for placement, local in chain.from_iterable(held_by_rank):
        if placement.tied_to is None:
            parts.setdefault(placement.name, []).append((placement, local))
    return {name: gather(pieces, check_replicas=False) for name, pieces in parts.items()}


def is_rounded(config: TrainConfig) -> bool:
    """Return whether a mesh computes at a lower precision than the dtype in which its weights are updated.

    In float64 even a mesh with low-precision products is compared with one process directly: sums differ only in their last
    bits, too little for a value to be rounded the other way.
    """
    few_bits = config.products != "plain" and config.dtype != "float64"
    coarse_sums = config.torch_reduce_dtype.itemsize < config.torch_dtype.itemsize
    return config.mixed_precision or coarse_sums or few_bits


def replay_steps(
    world: Comm, config: TrainConfig, text: Text, weights: list[Tensors], gradients: list[Tensors]
) -> list[RoundedStep]:
    """Return a RoundedStep for each step of a mesh, given its master weights before each step and its gradients in it."""
    rounded = whole_model(config)
    exact = whole_model(config, config.torch_master_dtype, products=False)
    masters = {name: torch.nn.Parameter(w.clone()) for name, w in weights[0].items()}
    family = config.choice("optimizer").load()
    groups = family.groups(masters.items(), config.weight_decay)
    optimizer, scaler = family.optimizer_class()(groups, lr=config.lr, betas=BETAS), make_scaler(config)
    steps = []
    for step, (before, of_mesh) in enumerate(zip(weights, gradients)):
        set_learning_rate(config, optimizer, step)
        batch = batch_of(config, text, step)
        scale = 1.0 if scaler is None else scaler.current_scale
        loss, own = gradients_of_microbatches(config, rounded, before, batch, step, scale)
        copies = {name: p.detach() for name, p in rounded.named_parameters()}
        exact_loss, without_rounding = gradients_at(exact, copies, batch, step)
        limits = allowed(config, (loss, own), (exact_loss, without_rounding))
        if not is_rounded(config):  # averages are lossy, all else is exact
            limits = dict.fromkeys(limits, TOLERANCE[config.dtype])
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


def gradients_of_microbatches(
    config: TrainConfig, model: Transformer, weights: Tensors, batch: Batch, step: int, scale: float
) -> tuple[float, Tensors]:
    """Return the loss and the gradients of a batch, added over the mesh's microbatches in the dtype in which the mesh adds.

    All replicas' k-th microbatches are computed at once, since a format of few bits may need the largest number of all.
    """
    groups = config.model.num_groups(config.batch_size, config.seq_len) if config.model.num_experts else None
    dtype = torch.promote_types(config.torch_reduce_dtype, config.torch_dtype)
    of_replicas = torch.arange(config.batch_size).split(config.dp_samples)
    microbatches = map(torch.chunk, of_replicas, config.dp_microbatches)
    loss, sums = 0.0, Tensors()
    for parts in zip_longest(*microbatches, fillvalue=torch.arange(0)):
        ids = torch.cat(parts)
        part, found = gradients_at(model, weights, batch.samples(ids), step, scale, groups, ids)
        loss += part
        sums = {name: g.to(dtype) + sums.get(name, 0.0) for name, g in found.items()}
    return loss, {name: total.to(config.torch_master_dtype) for name, total in sums.items()}


def allowed(
    config: TrainConfig, rounded: tuple[float, Tensors], exact: tuple[float, Tensors]
) -> dict[str, float]:
    """Return the allowed differences of gradients, by name, and of the loss, given two pairs (loss, gradients)."""
    unit = max(torch.finfo(dtype).eps for dtype in (config.torch_dtype, config.torch_reduce_dtype))
    (loss, own), (exact_loss, without_rounding) = rounded, exact
    times = LIMIT if config.tp == config.cp == 1 else CUT_LIMIT
    limits = {
        name: times * (unit + relative((own[name] - x).abs().max().item(), x.abs().max().item()))
        for name, x in without_rounding.items()
    }
    if config.model.num_experts:
        limits = {name: limit + FLIPPED for name, limit in limits.items()}
    return limits | {"loss": times * (unit + relative(abs(loss - exact_loss), abs(exact_loss)))}


def gradients_at(
    model: Transformer,
    weights: Tensors,
    batch: Batch,
    step: int,
    scale: float = 1.0,
    num_groups: int | None = None,
    sample_ids: torch.Tensor | None = None,
) -> tuple[float, Tensors]:
    """Return the loss of a batch and its gradients at these weights, rounded to the model's dtype.

    num_groups, sample_ids  the whole batch's number of routing groups, and the samples, if `batch` is a part of a batch
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    model.zero_grad()
    set_num_groups(model, num_groups, scale)
    loss = model.loss(batch.tokens, batch.targets, batch.positions, sample_ids, step, batch.num_targets)
    (loss * scale).backward()
    wide = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), {name: g.to(wide) / scale for name, g in grads.items() if g is not None}
