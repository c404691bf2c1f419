"""3D parallelism: 8 ranks, as pp 2 x dp 2 x tp 2, train a Transformer; one process trains it too, to compare.

    python -m simple.train                          (in minipar: python -m minipar.simple.train)
    python -m simple.train --pp 1 --cp 2 --zero --sequence
    torchrun --nproc-per-node 8 -m simple.train

    tp   inside a layer: its ranks compute it together, on the same tokens; all sums over tp are in the layer itself
    cp   inside attention: each rank has some tokens of every sequence; keys and values go around a ring
    ep   inside the experts' layer: each token is sent to the rank of its expert; the ranks of an ep group are ranks of dp
    pp   between layers: activations are sent to the next stage, gradients to the one before, microbatch by microbatch
    dp   at the end of a step: gradients are averaged over the ranks that have the same part of the model

The mesh may change; the losses do not. The balance loss of moe.py is left out: an inner stage has no loss to add it to.
In the library: `minipar train`, for any mesh.
"""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from torch import nn

from .ddp import average_gradients
from .launch import run
from .mesh import Mesh
from .pipeline import one_f_one_b
from .transformer import DIM, Groups, batch, shard, transformer
from .vocab import cross_entropy
from .zero import Zero1

BATCH, LENGTH, NUM_EXPERTS, LR = 16, 64, 4, 3e-3


def options(words=None):
    parser = ArgumentParser(
        prog="train", description="Train on a mesh of ranks, and compare with one process."
    )
    for axis, size in dict(pp=2, dp=2, cp=1, tp=2).items():
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--ep", type=int, default=0, help=f"{NUM_EXPERTS} experts a layer, over ep ranks")
    parser.add_argument(
        "--zero", action="store_true", help="ZeRO-1: the optimizer's state sharded over dp x cp"
    )
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism over tp")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(words)
    if min(args.pp, args.dp, args.cp, args.tp, args.microbatches, args.steps) < 1 or args.ep < 0:
        parser.error("every size is 1 or more; --ep 0 is without experts")
    if BATCH % (args.dp * args.microbatches) or LENGTH % args.cp:
        parser.error(
            f"dp x microbatches must divide {BATCH} sequences, cp {LENGTH} tokens; see `minipar train`"
        )
    if args.ep and (args.dp % args.ep or NUM_EXPERTS % args.ep or args.cp > 1 or args.sequence):
        parser.error("ep must divide dp and the experts, with whole sequences on a rank; see `minipar train`")
    return args


def train(world, args):
    """Train on the mesh. Return every step's loss, this rank's part of the model, and its groups."""
    mesh = Mesh(world, args.pp, args.dp, args.cp, args.tp)
    pp, dp, cp, tp = (mesh.comm(axis) for axis in ("pp", "dp", "cp", "tp"))
    replicas = mesh.comm("dp", "cp")
    num_ep = max(args.ep, 1)
    ep, same_experts = expert_groups(dp, num_ep)
    groups = Groups(tp, cp, ep, args.sequence)
    stage = transformer(groups, pp.rank, pp.size, NUM_EXPERTS if args.ep else 0)

    experts = [p for p in stage.parameters() if p.dim() == 3]
    dense = [p for p in stage.parameters() if p.dim() < 3]
    shared = [(dense, replicas), (experts, same_experts)] if experts else [(dense, replicas)]
    if args.zero:
        optimizers = [Zero1(params, torch.optim.AdamW, comm, lr=LR) for params, comm in shared]
    else:
        optimizers = [torch.optim.AdamW(params, LR) for params, _ in shared]

    tokens_of_a_rank = LENGTH // cp.size // (tp.size if args.sequence else 1)
    between_stages = (BATCH // dp.size // args.microbatches, tokens_of_a_rank, DIM)
    losses = torch.zeros(args.steps, dtype=torch.float64)
    for step in range(args.steps):
        inputs, targets = (own_part(x, dp, cp) for x in batch(step, BATCH, LENGTH))
        inputs = inputs if pp.rank == 0 else None
        targets = targets if pp.rank == pp.size - 1 else None
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = one_f_one_b(
            pp, stage, partial_loss(tp), inputs, targets, args.microbatches, between_stages, torch.float64
        )
        # An expert's gradient is a sum over the tokens of ep ranks; a gradient of `dense` is over one rank's tokens.
        for p in experts:
            p.grad /= num_ep
        if not args.zero:  # ZeRO averages them in its step
            for params, comm in shared:
                average_gradients(nn.ParameterList(params), comm)
        for optimizer in optimizers:
            optimizer.step()
        if loss is not None:
            losses[step] = replicas.all_reduce(loss, "mean")
    return pp.broadcast(losses, root=pp.size - 1), stage, groups


def expert_groups(dp, num_ep):
    """Cut dp into groups of num_ep neighbours. Return this rank's group, and the ranks of dp that hold the same experts."""
    start = dp.rank - dp.rank % num_ep
    same_experts = range(dp.rank % num_ep, dp.size, num_ep)
    return dp.subgroup(range(start, start + num_ep), "ep"), dp.subgroup(same_experts, "same experts")


def own_part(x, dp, cp):
    """[BATCH, LENGTH] -> [BATCH/dp, LENGTH/cp]: this rank's sequences, its tokens of each."""
    return x.chunk(dp.size)[dp.rank].chunk(cp.size, 1)[cp.rank]


def partial_loss(tp):
    """Return the loss of a microbatch whose logits are sharded over tp.   logits [B, T, V/tp]   targets [B, T]"""
    return lambda logits, targets: cross_entropy(tp, logits.flatten(0, 1), targets.flatten())


def one_process(world, args):
    """Train the whole model in a plain loop on rank 0; return every step's loss, and the model.

    Other ranks do not train: they return losses of 0 and the initial model.
    """
    alone = world.subgroup([world.rank], "alone")
    model = transformer(Groups(alone, alone, alone), num_experts=NUM_EXPERTS if args.ep else 0)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    losses = torch.zeros(args.steps, dtype=torch.float64)
    if world.rank > 0:
        return losses, model  # rank 0 trains it; the other ranks take its weights
    for step in range(args.steps):
        tokens, targets = batch(step, BATCH, LENGTH)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses, model


def compare(world, args, show=print):
    """Train both ways; show the losses. Return the largest difference between a rank's weights and one process's."""
    losses, stage, groups = train(world, args)
    reference, model = one_process(world, args)
    whole = {name: world.broadcast(p.detach()) for name, p in model.named_parameters()}
    apart = [0.0]
    for name, p in stage.named_parameters():
        same_part = shard(groups, name.split(".")[-1], whole[name])
        apart.append((p - same_part).abs().max().item())
    apart = world.all_reduce(torch.tensor([max(apart)], dtype=torch.float64), "max").item()
    if world.rank == 0:
        for step in range(0, args.steps, 13):
            show(
                f"step {step:2}   loss on the mesh {losses[step]:.12f}   in one process {reference[step]:.12f}"
            )
        show(f"after {args.steps} steps no parameter of any rank is off by more than {apart:.0e}")
    return apart


if __name__ == "__main__":
    args = options()
    run(compare, args.pp * args.dp * args.cp * args.tp, args, timeout_s=600)
