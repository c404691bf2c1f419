"""3D parallelism: 8 ranks, as dp 2 x tp 2 x pp 2, train a Transformer on real text; one process trains it too, to compare.

    python -m minipar.simple.train

    tp   inside a layer: its ranks compute it together, on the same tokens; all sums over tp are in the layer itself
    pp   between layers: activations are sent to the next stage, gradients to the one before, microbatch by microbatch
    dp   at the end of a step: gradients are averaged over the ranks that have the same part of the model

Change DP, TP, PP (DP must divide BATCH): the losses stay the same. In the library: `minipar train`, for any mesh.
"""

import torch

from minipar.runtime.launch import run
from minipar.simple.transformer import DIM, batch, loss_of, part_of_model, whole_model

DP, TP, PP = 2, 2, 2
STEPS, BATCH, LENGTH, MICROBATCHES, LR = 40, 16, 64, 4, 3e-3


def one_process():
    model, losses = whole_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for step in range(STEPS):
        tokens, targets = batch(step, BATCH, LENGTH)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def on_mesh(world):
    """Train on the mesh, then in one process. Return both losses, and this rank's largest difference in a parameter."""
    ranks = torch.arange(world.size).view(PP, DP, TP)  # the ranks of a tp group are neighbours
    ((p, d, t),) = (ranks == world.rank).nonzero().tolist()
    lines = ("pp", ranks[:, d, t]), ("dp", ranks[p, :, t]), ("tp", ranks[p, d])
    pp, dp, tp = (world.subgroup(line.tolist(), axis) for axis, line in lines)
    stage, losses = part_of_model(whole_model(), p, PP, tp), []
    optimizer = torch.optim.AdamW(stage.parameters(), LR)
    for step in range(STEPS):
        tokens, targets = (x.chunk(DP)[d].chunk(MICROBATCHES) for x in batch(step, BATCH, LENGTH))
        optimizer.zero_grad()
        loss = pipeline_step(pp, stage, tokens, targets)
        for param in stage.parameters():
            param.grad = dp.all_reduce(param.grad, "mean")
        optimizer.step()
        losses.append(dp.all_reduce(loss, "mean").item())
    model, alone = one_process()  # the same part of its model must have equal parameters
    pairs = zip(stage.parameters(), part_of_model(model, p, PP, tp).parameters())
    return losses, alone, max((a - b).abs().max().item() for a, b in pairs)


def pipeline_step(pp, stage, tokens, targets):
    """Run GPipe: all forwards, then all backwards. Return the loss on the last stage, 0 elsewhere."""
    first, last, kept, loss = pp.rank == 0, pp.rank == PP - 1, [], torch.zeros((), dtype=torch.float64)
    for x, target in zip(tokens, targets):
        x = x if first else pp.recv((*x.shape, DIM), torch.float64, pp.rank - 1).requires_grad_()
        y = stage(x)
        if last:
            y = loss_of(y, target) / len(tokens)
            loss += y.detach()
        else:
            pp.send(y.detach(), pp.rank + 1)
        kept.append((x, y))
    for x, y in kept:
        y.backward(None if last else pp.recv(y.shape, y.dtype, pp.rank + 1))
        if not first:
            pp.send(x.grad, pp.rank - 1)
    return loss


if __name__ == "__main__":
    results = run(on_mesh, world_size=DP * TP * PP)
    losses, alone, _ = results[-1]  # the last stage has the losses
    for step in range(0, STEPS, 13):
        print(f"step {step:2}   loss on the mesh {losses[step]:.12f}   in one process {alone[step]:.12f}")
    off = max(apart for _, _, apart in results)
    print(f"after {STEPS} steps no parameter of any rank is off by more than {off:.0e}")
