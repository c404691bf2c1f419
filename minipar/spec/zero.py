"""Specifications of ZeRO-1 and ZeRO-2: the parameters of one process, a p-th part of the optimizer's state, DDP's bytes."""

from __future__ import annotations

import torch

from minipar.spec.memory import held_bytes, newer_objects_only, storages
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import Net, chain, loss_of, one_process, samples
from minipar.spec.words import differs

OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})]


def _trains(world, make, seed: int, steps: int = 3) -> str | None:
    for optimizer_cls, options in OPTIMIZERS:  # Adam hides a gradient that is wrong by a factor: SGD first
        net = Net(seed)
        optimizer = make(list(net.parameters()), optimizer_cls, world, **options)
        _, model = one_process(Net(seed), world.size, 4, steps, optimizer_cls, **options)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net(samples(world.rank, step, 4))).backward()
            optimizer.step()
        for name, p in net.named_parameters():
            what = f"rank {world.rank}: {name} after {steps} steps of {optimizer_cls.__name__}"
            if words := differs(what, p, dict(model.named_parameters())[name], world.size, rtol=1e-9):
                return words
    return None


def _accumulates(world, make, seed: int) -> str | None:
    """Check that the gradients of two backwards before a step accumulate."""
    net, model = Net(seed), Net(seed)
    optimizer = make(list(net.parameters()), torch.optim.SGD, world, lr=0.1)
    optimizer.zero_grad()
    for microbatch in range(2):
        loss_of(net(samples(world.rank, microbatch, 4))).backward()
        sum(loss_of(model(samples(r, microbatch, 4))) / world.size for r in range(world.size)).backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for (name, p), want in zip(net.named_parameters(), model.parameters()):
        if words := differs(
            f"rank {world.rank}: {name} after two backwards and a step", p, want, world.size, rtol=1e-9
        ):
            return words
    return None


def _bytes(world, make) -> str | None:
    net = chain(0, width=64)
    optimizer = make(list(net.parameters()), torch.optim.SGD, world.using("ring"), lr=0.1)
    num_bytes, p = sum(w.nbytes for w in net.parameters()), world.size
    world.traffic.reset()
    loss_of(net(torch.ones(2, 64, dtype=torch.float64))).backward()
    optimizer.step()
    sent, formula = world.traffic.sent_bytes, 2 * (p - 1) / p * num_bytes
    if abs(sent - formula) > 0.02 * formula + 64 * p:
        return (
            f"rank {world.rank}: {p} ranks, {num_bytes} bytes of parameters: it sent {sent}; a reduce-scatter and an "
            f"all-gather send 2(p-1)/p of them, {formula:.0f}"
        )
    return None


@newer_objects_only()
def _memory(world, make, stage: int) -> str | None:
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
    whole = num_bytes * (2 if stage == 1 else 1)  # parameters, and in stage 1 gradients
    allowed = whole + 6 * num_bytes / p  # two moments; the part and its gradient; two chunks of the Comm
    if held > 1.05 * allowed + 64 * 64 * p:
        return (
            f"rank {world.rank}: {p} ranks, {num_bytes} bytes of parameters: {held} bytes are held before a step; "
            f"with a p-th part of the state it is at most {allowed:.0f}: something is not cut"
        )
    return None


def _specification(stage: int) -> Specification:
    stages = [
        Stage("runs", lambda f: on_ranks(_trains, f, 0, 1, sizes=(1,))),
        Stage("small", lambda f: on_ranks(_trains, f, 1, 1, sizes=(2,))),
        Stage("drawn", lambda f: on_ranks(_trains, f, 2) or on_ranks(_accumulates, f, 3)),
        Stage("bytes", lambda f: on_ranks(_bytes, f, sizes=(3, 4))),
        Stage("memory", lambda f: on_ranks(_memory, f, stage, sizes=(2, 4))),
    ]
    cut = "the optimizer's state" if stage == 1 else "the optimizer's state and the gradients"
    return Specification(
        f"zero{stage}",
        f"Zero{stage}(params, optimizer_cls, comm, **options)",
        f"step() gives the parameters of one process; each rank keeps a p-th part of {cut}.",
        tuple(stages),
    )


SPECIFICATIONS = [_specification(1), _specification(2)]
