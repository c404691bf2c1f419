"""One training step on one rank: take its part of the batch, run forward and backward, clip, update."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.config.train_config import TrainConfig
from minipar.context import local_positions
from minipar.mesh import Mesh
from minipar.model import set_num_groups, take_metrics, update_balance_bias
from minipar.support.staging import pinned, to_device
from minipar.support.trace import span
from minipar.train.data.text import Text, batch_of
from minipar.train.log import Metrics
from minipar.train.metrics import routing, speed
from minipar.train.optim import grad_norm, may_step, set_learning_rate
from minipar.train.parallelize import RankState


def train_step(
    world: Comm,
    state: RankState,
    config: TrainConfig,
    text: Text,
    step: int,
    observe: Callable[[], None] | None = None,
    batch: LocalBatch | None = None,
    data_wait_s: float = 0.0,
) -> Metrics:
    """Run one step: compute and clip the gradients, update the parameters, return the step's metrics.

    observe      called when the gradients are complete, before they are clipped
    batch        this rank's part of the step's batch, if it was made ahead of time
    data_wait_s  how long this rank waited for that batch; counts as part of the step's time

    Raises NotFinite if the loss or the gradient norm is not finite and on_nan is "stop".
    """
    start_s = time.perf_counter()
    lr = set_learning_rate(config, state.optimizer, step)
    state.optimizer.zero_grad()
    state.averaging.begin_step(step)
    loss = gradients(world, state, config, text, step, batch)
    if observe is not None:
        observe()
    with span(world.trace, "compute", "optimizer"):
        scale = state.loss_scale
        norm = grad_norm(state.optimizer.tensors, world, state.shares)
        # The step's only wait for the GPU: loss and norm decide whether to update.
        loss, norm = torch.stack((loss.double(), norm.double())).tolist()
        norm /= scale
        # Loss and norm are the same on every rank, so all ranks step, or all skip.
        if stepped := may_step(config, step, loss, norm, state.scaler):
            clip_divisor = (norm + 1e-6) / config.grad_clip if 0 < config.grad_clip < norm else 1.0
            state.optimizer.step(grad_scale=scale * clip_divisor)
        if config.model.balance_bias:
            for stage in state.stages:
                update_balance_bias(stage, comm=state.mesh.comm("dp", "cp"))
    config.choice("dispatch").end_step(config, state, step)
    return {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "skipped": int(not stepped),
        **({} if state.scaler is None else {"loss_scale": scale}),
        "data_wait_s": data_wait_s,
        **speed(config, data_wait_s + time.perf_counter() - start_s),
        **routing(world, state, config),
    }


class LocalBatch(NamedTuple):
    """This rank's part of a batch: its samples (divided over dp) and its tokens of each (cut over cp), still on the CPU.

    tokens, targets  [b, T/cp] int64     sample_ids  [b]     b = B/dp, or this rank's `dp_samples`
    positions        [T/cp], each token's index in its sample; with documents [b, T/cp], its position in its document
    num_targets      targets that count towards the loss, in the whole batch
    """

    tokens: Tensor
    targets: Tensor
    sample_ids: Tensor
    positions: Tensor
    num_targets: int


def local_batch(mesh: Mesh, config: TrainConfig, text: Text, step: int, device: torch.device) -> LocalBatch:
    """Return this rank's part of a step's batch, in pinned memory if it will be copied to a GPU."""
    batch, at = batch_of(config, text, step), mesh.coordinates
    ids = torch.arange(config.batch_size).split(config.dp_samples)[at.dp]
    own = local_positions(config.seq_len, at.cp, config.cp, config.cp_layout, config.cp_ulysses)
    return LocalBatch(
        pinned(batch.tokens[ids][:, own], device),
        pinned(batch.targets[ids][:, own], device),
        pinned(ids, device),
        pinned(own if batch.positions is None else batch.positions[ids][:, own], device),
        batch.num_targets,
    )


def _inputs(batch: LocalBatch, device: torch.device) -> dict[str, Any]:
    """Return the batch on the device, as arguments for `Pipeline.step`."""
    tokens, targets, sample_ids, positions = (to_device(x, device) for x in batch[:4])
    of_tokens = {"positions": positions}
    return dict(
        inputs=tokens,
        targets=targets,
        count=batch.num_targets,
        per_sample={"sample_ids": sample_ids} | (of_tokens if positions.dim() == 2 else {}),
        stage_kwargs=of_tokens if positions.dim() == 1 else {},
    )


def gradients(
    world: Comm, state: RankState, config: TrainConfig, text: Text, step: int, batch: LocalBatch | None = None
) -> Tensor:
    """Compute and reduce the gradients of this step's batch; return the whole batch's loss, on every rank."""
    inputs = _inputs(batch or local_batch(state.mesh, config, text, step, world.device), world.device)
    inputs["stage_kwargs"]["step"] = step
    if config.model.num_experts:
        for stage in state.stages:
            groups = config.model.num_groups(config.batch_size, config.seq_len)
            set_num_groups(stage, groups, state.loss_scale)
    # By default ZeroOptimizer reduces gradients in every backward. Here it reduces once per step, when all gradients are
    # complete (all microbatches', deferred and tied ones too), unless reduce_every asks for a reduction in every backward.
    several = config.pp > 1 or max(config.dp_microbatches) > 1 or len(state.pipeline.schedule.actions[0]) > 2
    accumulates = several and config.reduce_every == "step"
    with state.optimizer.no_sync() if accumulates else nullcontext():
        loss = state.pipeline.step(**inputs, loss_scale=state.loss_scale)
    if accumulates:
        state.optimizer.synchronize()
    return reduce_loss(world, state, config, loss)


EVAL_STEPS = 4  # number of batches for a validation loss


def evaluate(world: Comm, state: RankState, config: TrainConfig, text: Text) -> float:
    """Return the mean loss over EVAL_STEPS batches of `text`, without dropout: the same batches every time."""
    losses = []
    for step in range(EVAL_STEPS):
        inputs = _inputs(local_batch(state.mesh, config, text, step, world.device), world.device)
        losses.append(reduce_loss(world, state, config, state.pipeline.evaluate(**inputs)))
    for stage in state.stages:
        take_metrics(stage)  # discard them: the next step reports only its own routing
    return torch.stack(losses).mean().item()


def reduce_loss(world: Comm, state: RankState, config: TrainConfig, loss: Tensor | None) -> Tensor:
    """Sum the parts of the batch's loss that the ranks of the last stage computed; every rank gets the sum."""
    if loss is None or state.mesh.coordinates.tp:  # all tp ranks have the same loss: count it once
        dtype = torch.promote_types(config.torch_dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=world.device)
    total: Tensor = world.all_reduce(loss.detach())
    return total
