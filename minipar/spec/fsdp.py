"""Specification of FSDP: one process's results, 16/p bytes held per parameter, 3 (p-1)/p P elements sent, units freed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from minipar.comm import Comm
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.specification import Specification, Stage
from minipar.spec.training import DRAWN, Options, Scaled, Trainee, chain, loss_of, trains, varied
from minipar.spec.words import in_words
from minipar.support.live_bytes import LiveBytes

PADDING_BYTES = 512  # largest padding allowed per chunk


def _start(make: Implementation, net: Any, world: Comm, cls: Any, options: Options) -> Trainee:
    fsdp = make(net, world, type(net[0]))
    shards = list(fsdp.parameters())
    return Trainee(fsdp, cls(shards, **options), "", shards=shards)


def _bytes(world: Comm, make: Implementation) -> str | None:
    net = chain(0, width=64)
    num_bytes, p = sum(w.nbytes for w in net.parameters()), world.size
    fsdp = make(net, world.using("ring"), nn.Linear)
    for _ in range(2):  # a version that prefetches may not know the order of units in the first step
        with counted(world) as sent:
            loss_of(fsdp(torch.ones(2, 64, dtype=torch.float64, requires_grad=True))).backward()
    most = 3 * (p - 1) / p * num_bytes
    least = (3 - 1 / 4) * (p - 1) / p * num_bytes  # the last of four units may stay gathered for the backward
    padding = 3 * len(net) * (p - 1) * PADDING_BYTES
    if not 0.99 * least <= sent.sent_bytes <= 1.01 * most + padding:
        return (
            f"{p} ranks, {num_bytes} bytes of parameters: it sent {in_words(sent)}; two gathers and a "
            f"reduce-scatter send 3(p-1)/p of them, {most:.0f}, or a gather of the last unit less"
        )
    return None


def _memory(world: Comm, make: Implementation) -> str | None:
    before = storages()
    fsdp = make(chain(0, width=64, depth=8).float(), world, nn.Linear)
    optimizer = torch.optim.Adam(fsdp.parameters(), lr=0.1)
    total, p = 8 * (64 * 64 + 64) * 4, world.size
    for _ in range(2):
        optimizer.zero_grad()
        with LiveBytes() as live:
            loss_of(fsdp(torch.ones(1, 64, requires_grad=True))).backward()
        optimizer.step()
    held = held_bytes(before)
    if held > 1.1 * 4 * total / p + 64 * 64 * 4:
        return (
            f"{p} ranks: {held} bytes are held between steps; parameters, gradients and two states "
            f"over p are {4 * total / p:.0f}: something is whole"
        )
    if live.peak > 0.9 * total + total / p * 2 + 60_000:
        return f"{live.peak} bytes are made in a step; units of {total // 8} bytes are not freed"
    return None


_scaled = partial(chain, layer=Scaled)
_train = partial(trains, start=_start, makes=(chain,), width=5)
SPECIFICATIONS = [
    Specification(
        "fsdp",
        "FSDP(module, comm, unit_class)",
        "Outputs and gradients of one process; parameters() are shards; a unit is whole only while it runs. Parameters "
        "that are frozen, tied, outside units or without a gradient are not asked for.",
        (
            Stage("runs", _train, (1,)),
            Stage("small", partial(_train, seed=1), (2,)),
            Stage("drawn", partial(_train, makes=(chain, _scaled, chain), moves=DRAWN, seed=2)),
            Stage("bytes", _bytes, (2, 4)),
            Stage("memory", _memory, (2, 4)),
            Stage(
                "varied",
                partial(
                    varied, start=_start, make=partial(chain, width=48, depth=2), width=48, looks=("look",)
                ),
                (2, 5),
            ),
        ),
    )
]
