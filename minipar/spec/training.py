"""Small models trained on ranks and by one process, for the specifications of DDP, ZeRO and FSDP."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from minipar.spec.words import generator


class Net(nn.Module):
    """Three layers, the middle one used twice, and a buffer."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.last = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.register_buffer("offset", torch.randn(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x + self.offset))
        return self.last(torch.tanh(self.tied(torch.tanh(self.tied(h)))))


def chain(seed: int, width: int = 5, depth: int = 4) -> nn.Sequential:
    """Return a chain of linear layers: one FSDP unit each."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).double()


def samples(rank: int, step: int, width: int) -> Tensor:
    """Return the part of a step's batch that `rank` has."""
    return torch.randn(3, width, generator=generator(rank, step, width), dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def one_process(model: nn.Module, size: int, width: int, steps: int, optimizer_cls, **options):
    """Train on the mean of `size` ranks' losses in a plain loop. Return (each step's gradients by name, the model)."""
    optimizer, history = optimizer_cls(model.parameters(), **options), []
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model(samples(rank, step, width))) / size for rank in range(size)).backward()
        history.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return history, model


class _Recorded:
    """A handle that appends its waits to `events`."""

    def __init__(self, handle, events: list, name: str):
        self._handle, self._events, self._name = handle, events, name

    def wait(self):
        self._events.append(("wait", self._name))
        return self._handle.wait()


def recording(comm, events: list):
    """Return a copy of `comm` whose reductions and gathers add ("launch", bytes) and ("wait", collective) to `events`."""
    other = copy.copy(comm)
    for name in ("all_reduce", "all_reduce_", "reduce_scatter", "all_gather"):
        setattr(other, name, partial(_call, getattr(comm, name), name, events))
    return other


def _call(collective, name: str, events: list, x, *args, async_op: bool = False, **options):
    events.append(("launch", x.nbytes))
    result = collective(x, *args, async_op=async_op, **options)
    if async_op:
        return _Recorded(result, events, name)
    events.append(("wait", name))
    return result
