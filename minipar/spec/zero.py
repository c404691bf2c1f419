"""Specifications of ZeRO-1 and ZeRO-2: one process's parameters, 1/p of the optimizer's state, as many bytes as DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.specification import Specification, Stage
from minipar.spec.training import (
    OPTIMIZERS,
    Options,
    Trainee,
    chain,
    frozen,
    loss_of,
    or_refused,
    stages,
)


def _start(make: Implementation, net: nn.Module, world: Comm, cls: Any, options: Options) -> Trainee:
    """The parameters are given as a generator."""
    return Trainee(net, make(net.parameters(), cls, world, **options), "parameters")


def _memory(world: Comm, make: Implementation, stage: int) -> str | None:
    """Check the bytes held before a step: all parameters, 1/p of the state, all gradients (stage 1) or 1/p (stage 2)."""
    before = storages()
    net = chain(0, width=64, depth=6).float()
    optimizer = make(list(net.parameters()), torch.optim.Adam, world, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net(torch.ones(2, 64))).backward()
        held = held_bytes(before)
        optimizer.step()
    num_bytes, p = sum(w.nbytes for w in net.parameters()), world.size
    whole = num_bytes * (2 if stage == 1 else 1)  # parameters and, in stage 1, gradients
    # Two moments, the shard and its gradient, and two chunks of the Comm.
    allowed = whole + 6 * num_bytes / p
    if held > 1.05 * allowed + 64 * 64 * p:
        return (
            f"{p} ranks, {num_bytes} bytes of parameters: {held} bytes are held before a step; "
            f"with 1/p of the state it is at most {allowed:.0f}: something is not cut"
        )
    return None


def _specification(stage: int) -> Specification:
    refusable = partial(or_refused, start=_start, makes=(frozen,), moves=("train", "train"))
    cut = "the optimizer's state" if stage == 1 else "the optimizer's state and the gradients"
    return Specification(
        f"zero{stage}",
        f"Zero{stage}(params, optimizer_cls, comm, **options)",
        f"step() gives the parameters of one process; each rank keeps 1/p of {cut}. Optimizers are elementwise; frozen "
        "parameters may be refused, by an exception; parameters that get no gradient are not asked for.",
        stages(
            _start,
            refusable,
            optimizers=OPTIMIZERS,
            between=[Stage("memory", partial(_memory, stage=stage), (2, 4))],
        ),
    )


SPECIFICATIONS = [_specification(1), _specification(2)]
