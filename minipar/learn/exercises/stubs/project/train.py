"""Train a Transformer on a mesh, with all pieces of this folder, and compare with one process.

    python train.py                                       8 ranks: pp 2 x dp 2 x tp 2
    python train.py --pp 1 --dp 2 --tp 1 --ep 2 --zero    2 ranks; --help lists everything

Pieces that are not written yet are taken from minipar.simple, as is `train` below, the last of the ten. `train` uses

    Mesh(world, pp, dp, cp, tp).comm("tp")                     this rank's group along one or more axes
    transformer(Groups(tp, cp, ep, sequence), stage, num_stages, num_experts)    this rank's part of the model
    batch(step, BATCH, LENGTH)                                 (tokens, targets), [BATCH, LENGTH], of all ranks

    partial_loss(tp)                                           the loss_fn of one_f_one_b

dp cuts a batch along dim 0, cp along dim 1, in equal consecutive chunks. Between stages an activation has LENGTH/cp tokens
of a sequence, with sequence parallelism LENGTH/cp/tp.

An ep group is args.ep consecutive ranks of a dp group; experts are never used with cp. Expert parameters, those with three
dims, are the same on those ranks of a dp group that have the same rank in their ep groups. Their gradients are already sums
over the tokens of an ep group, so the mean over dp must divide them by args.ep as well. All other parameters are the same
over dp x cp.

Checked: on three meshes, after two steps, no weight differs from one process's by more than 1e-10.
"""

import torch

from minipar.learn.exercises.project import main
from minipar.simple.ddp import average_gradients
from minipar.simple.mesh import Mesh
from minipar.simple.pipeline import one_f_one_b
from minipar.simple.train import BATCH, LENGTH, LR, NUM_EXPERTS, partial_loss
from minipar.simple.transformer import DIM, Groups, batch, transformer
from minipar.simple.zero import Zero1


def train(world, args):
    """Train for args.steps steps on the mesh args.pp, args.dp, args.cp, args.tp, with args.microbatches.

    args.ep         0: no experts; else NUM_EXPERTS in each layer, over args.ep ranks
    args.zero       ZeRO-1 instead of averaged gradients
    args.sequence   sequence parallelism: between layers a rank has 1/tp of its tokens

    Optimizer: torch.optim.AdamW with lr=LR. Returns (each step's loss [steps], on every rank; stage; its Groups).
    """
    raise NotImplementedError


if __name__ == "__main__":
    main(__file__)
