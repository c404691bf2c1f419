"""DTensor's column, row and sequence parallel, and its embedding and loss_parallel over a sharded vocabulary."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel


def placed(comm, *tensors):
    """Return these tensors, (local, placement), as DTensors."""
    mesh = DeviceMesh.from_group(comm.process_group(), comm.device.type)
    return [DTensor.from_local(local, mesh, [placement]) for local, placement in tensors]


def mlp(comm, x, gate, up, down):
    x, gate, up, down = placed(comm, (x, Replicate()), (gate, Shard(0)), (up, Shard(0)), (down, Shard(1)))
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return y.redistribute(placements=[Replicate()]).to_local()


def block(comm, x, norm, gate, up, down):
    x, norm, gate, up, down = placed(
        comm, (x, Shard(1)), (norm, Replicate()), (gate, Shard(0)), (up, Shard(0)), (down, Shard(1))
    )
    whole = F.rms_norm(x, (x.shape[-1],), norm, 1e-5).redistribute(placements=[Replicate()])
    y = F.linear(F.silu(F.linear(whole, gate)) * F.linear(whole, up), down)
    return (x + y.redistribute(placements=[Shard(1)])).to_local()


def embedding(comm, tokens, w):
    tokens, w = placed(comm, (tokens, Replicate()), (w, Shard(0)))
    return F.embedding(tokens, w).redistribute(placements=[Replicate()]).to_local()


def cross_entropy(comm, logits, targets):
    return LossParallel.apply(logits, targets, comm)


class LossParallel(torch.autograd.Function):
    """The backward, too, must run in loss_parallel: so it is run here, and not by the caller."""

    @staticmethod
    def forward(ctx, logits, targets, comm):
        with torch.enable_grad(), loss_parallel():
            ctx.logits = placed(comm, (logits.detach(), Shard(1)))[0].requires_grad_()
            ctx.loss = F.cross_entropy(ctx.logits, targets)
        return ctx.loss.to_local().detach()

    @staticmethod
    def backward(ctx, dy):
        with loss_parallel():
            ctx.loss.backward(DTensor.from_local(dy, ctx.loss.device_mesh))
        return ctx.logits.grad.to_local(), None, None
