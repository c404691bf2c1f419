"""Specification of FSDP: the numbers of one process, 16/p bytes held per parameter, 3(p-1)/p P sent, units freed."""

from __future__ import annotations

import torch
from torch import nn

from minipar.live_bytes import LiveBytes
from minipar.spec.memory import held_bytes, newer_objects_only, storages
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import chain, loss_of, one_process, samples
from minipar.spec.words import differs

WIDTH = 5
PADDING_BYTES = 512  # at most, per chunk


def _trains(world, make, seed: int, steps: int = 3) -> str | None:
    """Check every step's output and the gradient's norm over all shards, whose layout is free, against one process."""
    fsdp = make(chain(seed + world.rank, WIDTH), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.3)
    history, _ = one_process(chain(seed), world.size, WIDTH, steps, torch.optim.SGD, lr=0.3)
    model = chain(seed)
    oracle = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        out = fsdp(samples(world.rank, step, WIDTH))
        what = f"rank {world.rank}: the output of step {step}"
        if words := differs(what, out, model(samples(world.rank, step, WIDTH)), world.size, rtol=1e-9):
            return words + ("" if step else ": rank 0's parameters should be everybody's")
        loss_of(out).backward()
        squares = sum(p.grad.square().sum() for p in fsdp.parameters() if p.grad is not None)
        squares = world.all_reduce(torch.as_tensor(squares, dtype=torch.float64).reshape(1))
        want = sum(g.square().sum() for g in history[step].values()).reshape(1)
        what = f"rank {world.rank}: the gradient's length, over all shards, in step {step}"
        if words := differs(what, squares.sqrt(), want.sqrt(), world.size, rtol=1e-9):
            return words
        optimizer.step()
        for p, g in zip(model.parameters(), history[step].values()):
            p.grad = g
        oracle.step()
    return None


def _bytes(world, make) -> str | None:
    net = chain(0, width=64)
    num_bytes, p = sum(w.nbytes for w in net.parameters()), world.size
    fsdp = make(net, world.using("ring"), nn.Linear)
    for _ in range(2):  # a version that prefetches may not know the order of units in the first step
        world.traffic.reset()
        loss_of(fsdp(torch.ones(2, 64, dtype=torch.float64, requires_grad=True))).backward()
    sent, most = world.traffic.sent_bytes, 3 * (p - 1) / p * num_bytes
    least = (3 - 1 / 4) * (p - 1) / p * num_bytes  # the last of four units may stay gathered for the backward
    padding = 3 * len(net) * (p - 1) * PADDING_BYTES
    if not 0.99 * least <= sent <= 1.01 * most + padding:
        return (
            f"rank {world.rank}: {p} ranks, {num_bytes} bytes of parameters: it sent {sent}; two gathers and a "
            f"reduce-scatter send 3(p-1)/p of them, {most:.0f}, or a gather of the last unit less"
        )
    return None


@newer_objects_only()
def _memory(world, make) -> str | None:
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
            f"rank {world.rank}: {p} ranks: {held} bytes are held between steps; parameters, gradients and two states "
            f"over p are {4 * total / p:.0f}: something is whole"
        )
    if live.peak > 0.9 * total + total / p * 2 + 60_000:
        return f"rank {world.rank}: {live.peak} bytes are made in a step; units of {total // 8} bytes are not freed"
    return None


SPECIFICATIONS = [
    Specification(
        "fsdp",
        "FSDP(module, comm, unit_class)",
        "Outputs and gradients of one process; parameters() are shards; a unit is whole only while it runs.",
        (
            Stage("runs", lambda f: on_ranks(_trains, f, 0, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_trains, f, 1, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_trains, f, 2)),
            Stage("bytes", lambda f: on_ranks(_bytes, f, sizes=(2, 4))),
            Stage("memory", lambda f: on_ranks(_memory, f, sizes=(2, 4))),
        ),
    )
]
