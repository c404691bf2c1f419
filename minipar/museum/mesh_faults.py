"""Faults in the library. Each replaces one small thing on every rank, as people get it wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from minipar.comm import autograd
from minipar.context import attention_ring
from minipar.expert import once_per_node
from minipar.mesh import Mesh, placement_of
from minipar.model import block, moe
from minipar.model.moe_config import MoEConfig
from minipar.pipeline import slices
from minipar.pipeline.stage import Stage
from minipar.pipeline.tied import TiedGradients
from minipar.tensor_parallel import column, grid_model, parallel_linear, sequence
from minipar.train import parallelize, step, verification


def replaced(module, **names) -> SimpleNamespace:
    """Return the module's namespace with these names replaced, for one importer of it."""
    return SimpleNamespace(**{**vars(module), **names})


def every_world_rank_sums(world, change):
    """All gradients are summed over all ranks, as if every rank were a data-parallel replica."""
    change(parallelize, "gradient_comm", lambda mesh: lambda param: world)


def dx_not_summed(world, change):
    """The gradient of a column-parallel layer's input stays this rank's own term."""
    start = column._start_dx

    def alone(ctx, *args):
        ctx.comm = ctx.comm.subgroup([ctx.comm.rank], "alone")
        return start(ctx, *args)

    change(column, "_start_dx", alone)


def norm_gradients_not_summed(world, change):
    """Under sequence parallelism each rank keeps the gradient that its own tokens give a norm's weight."""
    change(sequence, "autograd", replaced(autograd, copy=lambda comm, x: x))


def outputs_added(world, change):
    """The outputs of a column-parallel layer, different features on each rank, are all-reduced."""
    split = parallel_linear.column_parallel
    change(
        parallel_linear,
        "column_parallel",
        lambda comm, *args: tuple(autograd.all_reduce(comm, y) for y in split(comm, *args)),
    )


def in_place_backward(world, change):
    """The all-reduce's backward writes into the gradient it was given, which the residual connection also reads."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return comm.all_reduce(x)

        @staticmethod
        def backward(ctx, dy):
            return ctx.comm.all_reduce_(dy), None

    change(parallel_linear, "autograd", replaced(autograd, all_reduce=lambda comm, x: InPlace.apply(x, comm)))


def shards_from_one_seed(world, change):
    """Every tensor-parallel rank draws its shard from the same seed: all shards are the first one."""
    right = verification.parallelize

    def same_shards(config, mesh, device):
        state = right(config, mesh, device)
        tp = mesh.comm("tp")
        for stage in state.stages:
            for param in stage.parameters():
                if placement_of(param).length != placement_of(param).global_shape:
                    param.data.copy_(tp.broadcast(param.data))
        return state

    change(verification, "parallelize", same_shards)


def replicas_counted_in_the_norm(world, change):
    """Parameters that every tensor-parallel rank holds whole are counted once on each of them."""
    change(parallelize, "norm_shares", lambda tensors, world: [1.0] * len(tensors))


def tied_ends_not_summed(world, change):
    """The first stage's embedding and the last stage's head are one weight, and each keeps its own gradient."""
    change(TiedGradients, "finish", lambda self: None)


def microbatches_not_divided(world, change):
    """Each microbatch's gradient is that of a mean over its own tokens, and all are added; the loss is logged rightly."""
    right = step.gradients

    def wrong(world, state, config, *args):
        loss = right(world, state, config, *args)
        for x in state.optimizer.tensors:
            if x.grad is not None:
                x.grad *= config.microbatches
        return loss

    change(step, "gradients", wrong)


def experts_divided_by_ep(world, change):
    """Expert gradients are averaged over the expert-parallel ranks, which had been summed by the all-to-all already."""
    right = step.gradients

    def wrong(world, state, *args):
        loss = right(world, state, *args)
        for x in state.optimizer.tensors:
            if "experts" in placement_of(x).name and x.grad is not None:
                x.grad /= state.mesh.sizes["ep"]
        return loss

    change(step, "gradients", wrong)


def capacity_per_rank(world, change):
    """A routing group is whatever tokens a rank has: another number of ranks drops other tokens."""
    right = moe.RoutingGroups
    change(moe, "RoutingGroups", lambda B, T, g: right(1, B * T, B * T))


def capacity_without_k(world, change):
    """An expert's capacity is computed as if each token chose one expert."""
    right = MoEConfig.capacity
    change(MoEConfig, "capacity", lambda self, group_tokens: right(replace(self, top_k=1), group_tokens))


def masked_by_local_position(world, change):
    """Ring attention masks by a token's place in the rank's own part: for a rank, all blocks look like the first."""
    right = attention_ring.local_runs
    change(
        attention_ring,
        "local_runs",
        lambda N, rank, size, layout: right(N, 0 if rank <= world.rank else size - 1, size, layout),
    )


def dropout_seeded_by_rank(world, change):
    """Each rank draws its masks from its own number: the copies of an activation get different masks."""
    right = block.counter_dropout

    def by_rank(x, p, seed, *args, **options):
        return right(x, p, seed + world.rank, *args, **options)

    change(block, "counter_dropout", by_rank)


def data_starts_over(world, change):
    """After a stop at step 2 the reader starts at the first batch again."""
    right = step.batch_of_step
    change(
        step,
        "batch_of_step",
        lambda text, seed, number, *sizes: right(text, seed, number - 2 if number >= 2 else number, *sizes),
    )


def only_rank_0_looks(world, change):
    """A barrier inside what only rank 0 does."""
    right = step.reduce_loss

    def and_a_barrier(world, *args):
        loss = right(world, *args)
        if world.rank == 0:
            world.barrier()
        return loss

    change(step, "reduce_loss", and_a_barrier)


def last_microbatch_alone(world, change):
    """Gradients are set to zero before each microbatch, not once a step: only the last one's remain."""
    right = Stage.forward

    def forward(self, *args, **options):
        for param in self.module.parameters():
            param.grad = None
        return right(self, *args, **options)

    change(Stage, "forward", forward)


def norms_summed_over_one_square(world, change):
    """On a 2.5D grid a norm's gradient is summed over the rows of the rank's own square, and not over the squares."""

    class OneSquare(grid_model.GridRMSNorm):
        def __init__(self, norm, blocks):
            q = blocks.line.size
            first = blocks.stack.rank // q * q
            square = blocks.stack.subgroup(range(first, first + q), "rows of a square")
            super().__init__(norm, blocks._replace(stack=square))

    change(grid_model, "GridRMSNorm", OneSquare)


def earlier_slices_get_no_gradient(world, change):
    """The keys and values that a stage keeps for the later slices of a sample are detached: nothing comes back."""
    change(slices, "_kept", lambda x: slices._Kept(None, x.detach()))


def copies_keep_their_own_gradients(world, change):
    """In a pipeline of two directions, the two ranks that hold the same stage do not sum their gradients."""
    change(Mesh, "sharing", Mesh.comm)


def one_weight_per_node(world, change):
    """A token that goes to a node once has one weight there: of its experts on the node, the last one's alone counts."""
    right = once_per_node.RowPerChoice

    def last_one_counts(x, weight, plan, dispatch):
        kept = plan.row >= 0
        from_here_on = kept.flip(1).cumsum(1).flip(1)  # kept choices, this one and later
        return right(x, weight * (kept & (from_here_on == 1)), plan, dispatch)

    change(once_per_node, "RowPerChoice", last_one_counts)
