"""One training step on one rank: its part of the batch, forward and backward, clip, update."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.context import local_positions
from minipar.model import set_num_groups, take_metrics, update_balance_bias
from minipar.staging import pinned, to_device
from minipar.trace import span
from minipar.train.compression import begin_step
from minipar.train.metrics import routing, speed
from minipar.train.optim import grad_norm, learning_rate
from minipar.train.parallelize import RankState
from minipar.train.reference import may_step
from minipar.train.text import Batch, batch_of_step
from minipar.train.train_config import TrainConfig


def train_step(
    world,
    state: RankState,
    config: TrainConfig,
    text,
    step: int,
    observe=None,
    batch: LocalBatch | None = None,
) -> dict:
    """Run one step: compute and clip the gradients, update the parameters, return the step's metrics.

    observe  called when the gradients are complete, before they are clipped
    batch    this rank's part of the step's, where it was made ahead of time

    Raises ArithmeticError where the loss or the gradient norm is not finite and on_nan is "stop".
    """
    start_s = time.perf_counter()
    lr = learning_rate(step, config.steps, config.highest_lr, config.warmup)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    state.optimizer.zero_grad()
    begin_step(state, config, step)
    loss = gradients(world, state, config, text, step, batch)
    if observe is not None:
        observe()
    with span(world.trace, "compute", "optimizer"):
        scale = state.loss_scale
        norm = grad_norm(state.optimizer.tensors, world, state.shares)
        # The step's one wait for a GPU: whether to update depends on both.
        loss, norm = torch.stack((loss.double(), norm.double())).tolist()
        norm /= scale
        # Loss and norm are the same on every rank, so all ranks step, or all skip.
        if stepped := may_step(config, step, loss, norm, state.scaler):
            too_long = (norm + 1e-6) / config.grad_clip if 0 < config.grad_clip < norm else 1.0
            state.optimizer.step(grad_scale=scale * too_long)
        if config.model.balance_bias:
            for stage in state.stages:
                update_balance_bias(stage, comm=state.mesh.sharing("dp", "cp"))
    return {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "skipped": int(not stepped),
        **({} if state.scaler is None else {"loss_scale": scale}),
        **speed(config, time.perf_counter() - start_s),
        **routing(world, state, config),
    }


def batch_of(config: TrainConfig, text, step: int) -> Batch:
    """The batch of a step of this run."""
    return batch_of_step(text, config.seed, step, config.batch_size, config.seq_len, config.sampling)


class LocalBatch(NamedTuple):
    """This rank's samples of a batch (dp) and its tokens of them (cp), still on the CPU.

    tokens, targets  [B/dp, T/cp] int64        sample_ids  [B/dp]        positions  [T/cp]
    count            how many targets of the whole batch count
    """

    tokens: Tensor
    targets: Tensor
    sample_ids: Tensor
    positions: Tensor
    count: int


def local_batch(mesh, config: TrainConfig, text, step: int, device: torch.device) -> LocalBatch:
    """This rank's part of the batch of a step, in pinned memory where `device`, to which it will be copied, is a GPU."""
    batch, at = batch_of(config, text, step), mesh.coordinates
    ids = torch.arange(config.batch_size).chunk(config.dp)[at.dp]
    positions = local_positions(config.seq_len, at.cp, config.cp, config.cp_layout, config.cp_ulysses)
    parts = batch.tokens[ids][:, positions], batch.targets[ids][:, positions], ids, positions
    return LocalBatch(*(pinned(x, device) for x in parts), batch.count)


def _inputs(batch: LocalBatch, device: torch.device) -> dict:
    """The batch on the device, as `Pipeline.step` takes it."""
    tokens, targets, sample_ids, positions = (to_device(x, device) for x in batch[:4])
    return dict(
        inputs=tokens,
        targets=targets,
        count=batch.count,
        per_sample={"sample_ids": sample_ids},
        stage_kwargs={"positions": positions},
    )


def gradients(
    world, state: RankState, config: TrainConfig, text, step: int, batch: LocalBatch | None = None
) -> torch.Tensor:
    """Compute and reduce the gradients of this step's batch; return the whole batch's loss, on every rank."""
    inputs = _inputs(batch or local_batch(state.mesh, config, text, step, world.device), world.device)
    inputs["stage_kwargs"]["step"] = step
    if config.model.num_experts:
        for stage in state.stages:
            groups = config.model.num_groups(config.batch_size, config.seq_len)
            set_num_groups(stage, groups, state.loss_scale)
    # ZeroOptimizer reduces gradients during every backward, and adds up what it has reduced. Unless that is asked for, it
    # reduces once, when all of a step's gradients are there: those of other microbatches, deferred ones, a tied stage's.
    several = config.pp > 1 or len(state.pipeline.schedule.actions[0]) > 2
    accumulates = several and config.reduce_every == "step"
    with state.optimizer.no_sync() if accumulates else nullcontext():
        loss = state.pipeline.step(**inputs, loss_scale=state.loss_scale)
    if accumulates:
        state.optimizer.synchronize()
    return reduce_loss(world, state, config, loss)


EVAL_STEPS = 4  # batches per validation loss


def evaluate(world, state: RankState, config: TrainConfig, text) -> float:
    """The mean loss over EVAL_STEPS batches of `text`, the same ones every time, without dropout; equal on every rank."""
    losses = []
    for step in range(EVAL_STEPS):
        inputs = _inputs(local_batch(state.mesh, config, text, step, world.device), world.device)
        losses.append(reduce_loss(world, state, config, state.pipeline.evaluate(**inputs)))
    for stage in state.stages:
        take_metrics(stage)  # discard: the next step reports its own routing only
    return torch.stack(losses).mean().item()


def reduce_loss(world, state: RankState, config: TrainConfig, loss: torch.Tensor | None) -> torch.Tensor:
    """Sum the parts of the batch's loss that the ranks of the last stage computed; every rank gets the sum."""
    if loss is None or state.mesh.coordinates.tp:  # all tp ranks have the same loss: count it once
        dtype = torch.promote_types(config.torch_dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=world.device)
    return world.all_reduce(loss.detach())
