"""A small network and its samples, for DDP and FSDP around what people write."""

import torch
from torch import nn

from minipar.data_parallel import DDP, FSDP


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def samples(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss_of(model, rank, step=0):
    return model(samples(rank, step).to(next(model.parameters()).dtype)).square().mean()


def penalised(model, rank, step=0):
    """A loss with the norm of its gradient in it."""
    x = samples(rank, step).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return slope.square().sum() + y.sum()


def in_one_process(model, size):
    (sum(loss_of(model, rank) for rank in range(size)) / size).backward()
    return {name: p.grad for name, p in model.named_parameters()}


WRAPPERS = {"DDP": DDP, "FSDP": FSDP}
