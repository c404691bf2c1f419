"""Megatron's f and g by hand: f is the identity with an all_reduce in its backward, g an all_reduce with the identity."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def summed(x, group):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


class CopyToRanks(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return summed(dy, ctx.group), None


class ReduceFromRanks(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def mlp(comm, x, gate, up, down):
    x = CopyToRanks.apply(x, comm.process_group())
    hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
    return ReduceFromRanks.apply(F.linear(hidden, down), comm.process_group())


def attention(comm, x, q, k, v, o):
    x = CopyToRanks.apply(x, comm.process_group())
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return ReduceFromRanks.apply(F.linear(mixed, o), comm.process_group())
