"""One training step on one rank: its part of the batch, forward and backward, clip, update."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from minipar.context import local_positions
from minipar.data_parallel import ZeroOptimizer
from minipar.model import set_num_groups, update_balance_bias
from minipar.trace import span
from minipar.train.config import TrainConfig
from minipar.train.optim import clip_grad_norm_, learning_rate
from minipar.train.parallelize import Replica
from minipar.train.text import Batch, batch_of_step


def train_step(
    world, replica: Replica, config: TrainConfig, text: torch.Tensor, step: int, observe=None
) -> dict:
    """Gradients of step `step`, clipped, and the update: what every line of the metrics describes.

    observe  called when the gradients are complete, before they are clipped
    """
    start_s = time.perf_counter()
    lr = learning_rate(step, config.steps, config.lr, config.warmup)
    for group in replica.optimizer.param_groups:
        group["lr"] = lr
    replica.optimizer.zero_grad()
    loss = gradients(world, replica, config, text, step)
    if observe is not None:
        observe()
    with span(world.trace, "compute", "optimizer"):
        norm = clip_grad_norm_(replica.tensors, config.grad_clip or float("inf"), world, replica.shares)
        replica.optimizer.step()
        if config.model.balance_bias:
            for stage in replica.stages:
                update_balance_bias(stage, comm=replica.mesh.comm("dp", "cp"))
    seconds = time.perf_counter() - start_s
    tokens_per_s = config.batch_size * config.seq_len / seconds
    return {
        "step": step,
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "lr": lr,
        "tokens_per_s": tokens_per_s,
        "seconds": seconds,
    }


def gradients(world, replica: Replica, config: TrainConfig, text: torch.Tensor, step: int) -> torch.Tensor:
    """Compute and reduce the gradients of this step's batch; the loss over all of it, on every rank."""
    mesh, optimizer = replica.mesh, replica.optimizer
    batch = batch_of_step(text, config.seed, step, config.batch_size, config.seq_len)
    ids, positions, tokens, targets = _mine(mesh, config, batch, world.device)
    if config.model.num_experts:
        for stage in replica.stages:
            set_num_groups(stage, config.model.num_groups(config.batch_size, config.seq_len))
    # ZeRO's optimizer reduces by hooks of its own, during the backward: right where that is one, whole, and nothing is
    # added to a gradient afterwards (another microbatch's, a deferred product, a tied stage's).
    several = config.pp > 1 or len(replica.pipeline.schedule.actions[0]) > 2
    with optimizer.no_sync() if several and isinstance(optimizer, ZeroOptimizer) else nullcontext():
        loss = replica.pipeline.step(
            tokens,
            targets,
            count=batch.count,
            per_sample={"sample_ids": ids},
            stage_kwargs={"positions": positions, "step": step},
        )
    if isinstance(optimizer, ZeroOptimizer) and several:
        optimizer.synchronize()
    counts_here = loss is not None and mesh.coordinates.tp == 0  # the other tp ranks have the same loss
    total = (
        loss
        if counts_here
        else torch.zeros_like(loss)
        if loss is not None
        else _no_loss(config, world.device)
    )
    return world.all_reduce(total.detach())


def _no_loss(config: TrainConfig, device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.promote_types(config.torch_dtype, torch.float32), device=device)


def _mine(mesh, config: TrainConfig, batch: Batch, device):
    """This rank's samples (dp) and tokens of them (cp), with their numbers in the whole batch."""
    at = mesh.coordinates
    ids = torch.arange(config.batch_size).chunk(config.dp)[at.dp]
    positions = local_positions(config.seq_len, at.cp, config.cp, config.cp_layout)
    tokens, targets = batch.tokens[ids][:, positions], batch.targets[ids][:, positions]
    return tuple(x.to(device) for x in (ids, positions, tokens, targets))
