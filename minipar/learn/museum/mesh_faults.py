"""Faults planted in the library. Each makes one small, common mistake on every rank.

A fault in an extra imports the extra only when the fault is planted, since other faults do not need it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm, autograd
from minipar.config.moe_config import MoEConfig
from minipar.config.train_config import TrainConfig
from minipar.context import attention_ring
from minipar.context.token_layout import local_runs
from minipar.data_parallel import ddp
from minipar.learn.museum.exhibit import Change
from minipar.mesh import Mesh, placement_of
from minipar.model import block, moe
from minipar.model.counter_dropout import dropout
from minipar.model.groups import RoutingGroups
from minipar.model.permute import RowPerChoice
from minipar.pipeline.stage import Stage
from minipar.pipeline.tied import TiedGradients
from minipar.tensor_parallel import column, parallel_linear, sequence
from minipar.train import parallelize, step
from minipar.train.data.text import batch_of
from minipar.train.parallelize import RankState

verification = import_module("minipar.train.verification.verify")  # the package also has a function `verify`


def replaced(module: ModuleType, **names: object) -> SimpleNamespace:
    """Return a copy of the module's namespace with these names replaced, to be planted in one importer of the module."""
    return SimpleNamespace(**{**vars(module), **names})


def every_world_rank_sums(world: Comm, change: Change) -> None:
    """All gradients are summed over all ranks, as if every rank were a replica; no DDP asks what they hold."""
    change(parallelize, "gradient_comm", lambda mesh: lambda param: world)
    change(ddp, "require_same_parameters", lambda *_: None)


def dx_not_summed(world: Comm, change: Change) -> None:
    """The gradient of a column-parallel layer's input is not summed: each rank keeps its own term."""
    start = column._start_dx

    def alone(ctx: Any, *args: Any) -> Any:
        ctx.comm = ctx.comm.subgroup([ctx.comm.rank], "alone")
        return start(ctx, *args)

    change(column, "_start_dx", alone)


def norm_gradients_not_summed(world: Comm, change: Change) -> None:
    """Under sequence parallelism, gradients of a norm's weight are not summed: each rank keeps that of its own tokens."""
    change(sequence, "autograd", replaced(autograd, copy=lambda comm, x: x))


def outputs_added(world: Comm, change: Change) -> None:
    """The outputs of a column-parallel layer, different features on each rank, are all-reduced."""
    split = column.column_parallel
    change(
        parallel_linear,
        "column_parallel",
        lambda comm, *args: tuple(autograd.all_reduce(comm, y) for y in split(comm, *args)),
    )


def in_place_backward(world: Comm, change: Change) -> None:
    """The all-reduce's backward overwrites the gradient it was given, which the residual connection also uses."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, comm: Comm) -> Any:
            ctx.comm = comm
            return comm.all_reduce(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return ctx.comm.all_reduce_(dy), None

    def all_reduce(comm: Comm, x: Tensor) -> Any:
        return InPlace.apply(x, comm)  # type: ignore[no-untyped-call]

    change(parallel_linear, "autograd", replaced(autograd, all_reduce=all_reduce))


def shards_from_one_seed(world: Comm, change: Change) -> None:
    """Every tensor-parallel rank draws its shard with the same seed, so all shards equal the first shard."""
    right = verification.parallelize

    def same_shards(config: TrainConfig, mesh: Mesh, device: torch.device) -> Any:
        state = right(config, mesh, device)
        tp = mesh.comm("tp")
        for stage in state.stages:
            for param in stage.parameters():
                if placement_of(param).length != placement_of(param).global_shape:
                    param.data.copy_(tp.broadcast(param.data))
        return state

    change(verification, "parallelize", same_shards)


def replicas_counted_in_the_norm(world: Comm, change: Change) -> None:
    """In the gradient norm, parameters that are the same on every tensor-parallel rank count once per rank."""
    change(parallelize, "norm_shares", lambda tensors, world: [1.0] * len(tensors))


def tied_ends_not_summed(world: Comm, change: Change) -> None:
    """The first stage's embedding and the last stage's head are one weight, and each keeps its own gradient."""
    change(TiedGradients, "finish", lambda self: None)


def microbatches_not_divided(world: Comm, change: Change) -> None:
    """The gradients of the microbatches' mean losses are added instead of averaged; the logged loss is right."""
    right = step.gradients

    def wrong(world: Comm, state: RankState, config: TrainConfig, *args: Any) -> Tensor:
        loss = right(world, state, config, *args)
        for x in state.optimizer.tensors:
            if x.grad is not None:
                x.grad *= config.microbatches
        return loss

    change(step, "gradients", wrong)


def experts_averaged_over_replicas(world: Comm, change: Change) -> None:
    """Expert gradients are divided by the number of ranks with the same experts, dp/ep, instead of all data ranks, dp."""
    right = step.gradients

    def wrong(world: Comm, state: RankState, *args: Any) -> Tensor:
        loss = right(world, state, *args)
        for x in state.optimizer.tensors:
            if "experts" in placement_of(x).name and x.grad is not None:
                x.grad *= state.mesh.sizes["ep"]
        return loss

    change(step, "gradients", wrong)


def capacity_per_rank(world: Comm, change: Change) -> None:
    """A routing group is all tokens of a rank, so which tokens are dropped depends on the number of ranks."""
    right = RoutingGroups
    change(moe, "RoutingGroups", lambda B, T, g: right(1, B * T, B * T))


def capacity_without_k(world: Comm, change: Change) -> None:
    """An expert's capacity is computed as if each token chose one expert."""
    right = MoEConfig.capacity
    change(MoEConfig, "capacity", lambda self, group_tokens: right(replace(self, top_k=1), group_tokens))


def masked_by_local_position(world: Comm, change: Change) -> None:
    """Ring attention masks by a token's index in its rank's own part: earlier keys are masked like the rank's own."""
    right = local_runs
    change(
        attention_ring,
        "local_runs",
        lambda N, rank, size, layout: right(N, 0 if rank <= world.rank else size - 1, size, layout),
    )


def dropout_seeded_by_rank(world: Comm, change: Change) -> None:
    """Each rank seeds its dropout masks by its rank, so the copies of one activation get different masks."""
    right = dropout

    def by_rank(x: Tensor, p: float, seed: int, *args: Any, **options: Any) -> Any:
        return right(x, p, seed + world.rank, *args, **options)

    change(block, "counter_dropout", by_rank)


def data_starts_over(world: Comm, change: Change) -> None:
    """After a stop at step 2, the data starts again at the first batch."""
    right = batch_of
    change(step, "batch_of", lambda config, text, n: right(config, text, n - 2 if n >= 2 else n))


def only_rank_0_looks(world: Comm, change: Change) -> None:
    """A barrier is inside code that only rank 0 runs."""
    right = step.reduce_loss

    def and_a_barrier(world: Comm, *args: Any) -> Tensor:
        loss = right(world, *args)
        if world.rank == 0:
            world.barrier()
        return loss

    change(step, "reduce_loss", and_a_barrier)


def last_microbatch_alone(world: Comm, change: Change) -> None:
    """Gradients are set to zero before each microbatch, not once per step, so only the last microbatch's remain."""
    right = Stage.forward

    def forward(self: Stage, *args: Any, **options: Any) -> Any:
        for param in self.module.parameters():
            param.grad = None
        return right(self, *args, **options)

    change(Stage, "forward", forward)


def norms_summed_over_one_square(world: Comm, change: Change) -> None:
    """On a 2.5D grid, a norm's gradient is summed over the rows of the rank's own square, but not over the squares."""
    from minipar.extras.tensor_grids import grid_model

    class OneSquare(grid_model.GridRMSNorm):
        def __init__(self, norm: Any, blocks: Any) -> None:
            q = blocks.line.size
            first = blocks.stack.rank // q * q
            square = blocks.stack.subgroup(range(first, first + q), "rows of a square")
            super().__init__(norm, blocks._replace(stack=square))

    change(grid_model, "GridRMSNorm", OneSquare)


def earlier_slices_get_no_gradient(world: Comm, change: Change) -> None:
    """The keys and values that a stage keeps for later slices of a sample are detached, so they get no gradient."""
    from minipar.extras.schedules import sliced_pipeline

    change(sliced_pipeline, "_kept", lambda x: sliced_pipeline._Kept(None, x.detach()))


def one_weight_per_rank(world: Comm, change: Change) -> None:
    """A token's two weights are scattered by rank: of two experts on one rank, only the last one's weight is left."""
    right = RowPerChoice

    def last_one_counts(x: Tensor, weight: Tensor, plan: Any, dispatch: Any) -> Any:
        expert = torch.bucketize(plan.row, plan.counts.cumsum(0), right=True)
        rank = (expert // (len(plan.counts) // world.size)).masked_fill(plan.row < 0, -1)  # -1: dropped
        first, last = weight.unbind(1)
        return right(x, torch.stack([first * (rank[:, 0] != rank[:, 1]), last], 1), plan, dispatch)

    change(moe, "RowPerChoice", last_one_counts)
