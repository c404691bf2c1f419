"""Small models trained on ranks and by one process, for the specifications of DDP, ZeRO and FSDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.words import generator, grad_of, normal

Event = tuple[str, Any]


class Net(nn.Module):
    """Three layers, the middle one used twice, and a buffer."""

    offset: Tensor

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.last = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.register_buffer("offset", torch.randn(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x + self.offset))
        y: Tensor = self.last(torch.tanh(self.tied(torch.tanh(self.tied(h)))))
        return y


class Mixed(nn.Module):
    """Parameters of one to thousands of elements, one not contiguous; a buffer with an integer that no float can hold."""

    count: Tensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.large = nn.Linear(4, 48), nn.Linear(48, 48, bias=False)
        self.turned = nn.Parameter(torch.randn(3, 48).t())
        self.scale = nn.Parameter(1 + torch.rand(()))
        self.register_buffer("count", torch.tensor(2**53 + 1 + 2 * seed))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.large(torch.tanh(self.first(x))))
        return h @ self.turned * self.scale


def chain(seed: int, width: int = 5, depth: int = 4) -> nn.Sequential:
    """Return a chain of linear layers, each an FSDP unit."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).double()


def samples(rank: int, step: int, width: int) -> Tensor:
    """Return `rank`'s part of a step's batch."""
    return normal(generator(rank, step, width), 3, width)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def one_process(
    model: nn.Module,
    size: int,
    width: int,
    steps: int,
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    **options: float,
) -> tuple[list[dict[str, Tensor]], nn.Module]:
    """Train on the mean of `size` ranks' losses in a plain loop. Return (each step's gradients by name, the model)."""
    optimizer, history = optimizer_cls(model.parameters(), **options), []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            (loss_of(model(samples(rank, step, width))) / size).backward()
        history.append({name: grad_of(p).clone() for name, p in model.named_parameters()})
        optimizer.step()
    return history, model


class _Recorded:
    """A handle that appends to `events` when it is waited for."""

    def __init__(self, handle: Any, events: list[Event], name: str):
        self._handle, self._events, self._name = handle, events, name

    def wait(self) -> Any:
        self._events.append(("wait", self._name))
        return self._handle.wait()


def recording(comm: Comm, events: list[Event]) -> Comm:
    """Return a copy of `comm` whose reductions and gathers add ("launch", bytes) and ("wait", collective) to `events`."""
    other = copy.copy(comm)
    for name in ("all_reduce", "all_reduce_", "reduce_scatter", "all_gather"):
        if hasattr(comm, name):
            setattr(other, name, partial(_call, getattr(comm, name), name, events))
    return other


def _call(
    collective: Callable[..., Any],
    name: str,
    events: list[Event],
    x: Tensor,
    *args: Any,
    async_op: bool = False,
    **options: Any,
) -> Any:
    events.append(("launch", x.nbytes))
    result = collective(x, *args, async_op=async_op, **options)
    if async_op:
        return _Recorded(result, events, name)
    events.append(("wait", name))
    return result
