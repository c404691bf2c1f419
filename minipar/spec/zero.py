"""Specifications of ZeRO-1 and ZeRO-2: one process's parameters, 1/p of the optimizer's state, as many bytes as DDP."""

from __future__ import annotations

import torch

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import Mixed, Net, chain, loss_of, one_process, samples
from minipar.spec.varied import BFLOAT16, FLOAT32, LARGE, NAN, RANKS
from minipar.spec.words import first, mismatch

OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})]


def _trains(world: Comm, make: Implementation, seed: int, steps: int = 3) -> str | None:
    for optimizer_cls, options in OPTIMIZERS:  # SGD first, since Adam hides a wrong factor
        net, start = Net(seed), dict(Net(seed).named_parameters())
        optimizer = make(list(net.parameters()), optimizer_cls, world, **options)
        _, model = one_process(Net(seed), world.size, 4, steps, optimizer_cls, **options)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net(samples(world.rank, step, 4))).backward()
            optimizer.step()
        wanted, taken = dict(model.named_parameters()), "1 step" if steps == 1 else f"{steps} steps"
        for name, p in net.named_parameters():
            # Of the change, not of the value: its factor says that a sum stands where a mean is due.
            what = f"rank {world.rank}: the change of {name} after {taken} of {optimizer_cls.__name__}"
            if words := mismatch(what, p - start[name], wanted[name] - start[name], world.size, rtol=1e-9):
                return words
    return None


def _varied(world: Comm, make: Implementation) -> str | None:
    """Check steps of a module with odd parameters, in several dtypes; the parameters are given as a generator."""
    r, p = world.rank, world.size
    for kind in (LARGE, FLOAT32, BFLOAT16, NAN):
        net, model = Mixed(9, kind.dtype), Mixed(9, kind.dtype).double()
        # A step larger than the parameters, so that a gradient's error is not lost in their rounding.
        lr = 10.0
        optimizer = make(net.parameters(), torch.optim.SGD, world, lr=lr)
        one_process_s = torch.optim.SGD(model.parameters(), lr=lr)
        for step in range(2 if kind is LARGE else 1):
            optimizer.zero_grad()
            one_process_s.zero_grad()
            xs = [kind.rounded(samples(s, step, 4)) for s in range(p)]
            xs[0] = kind.with_nan(xs[0])
            loss_of(net(kind.given(xs[r]))).backward()
            for x in xs:
                (loss_of(model(x)) / p).backward()
            optimizer.step()
            one_process_s.step()
            for name, w in net.named_parameters():
                want = dict(model.named_parameters())[name].detach()
                what = f"rank {r}: {name} {list(w.shape)} after step {step}"
                if words := kind.mismatch(what, w, want, p):
                    return words
    return None


def _begins_alike(world: Comm, make: Implementation) -> str | None:
    """Check that all ranks begin with rank 0's parameters."""
    net = Net(world.rank)
    make(list(net.parameters()), torch.optim.SGD, world, lr=0.1)
    wanted = dict(Net(0).named_parameters())
    words = first([mismatch(name, p, wanted[name]) for name, p in net.named_parameters()])
    if words is None:
        return None
    return (
        f"rank {world.rank}: it does not begin with rank 0's parameters: broadcast them in __init__ ({words})"
    )


def _accumulates(world: Comm, make: Implementation, seed: int) -> str | None:
    """Check that the gradients of two backwards before a step accumulate."""
    net, model = Net(seed), Net(seed)
    optimizer = make(list(net.parameters()), torch.optim.SGD, world, lr=0.1)
    optimizer.zero_grad()
    for microbatch in range(2):
        loss_of(net(samples(world.rank, microbatch, 4))).backward()
        for r in range(world.size):
            (loss_of(model(samples(r, microbatch, 4))) / world.size).backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for (name, p), want in zip(net.named_parameters(), model.parameters()):
        if words := mismatch(
            f"rank {world.rank}: {name} after two backwards and a step", p, want, world.size, rtol=1e-9
        ):
            return words
    return None


def _bytes(world: Comm, make: Implementation) -> str | None:
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
            f"rank {world.rank}: {p} ranks, {num_bytes} bytes of parameters: {held} bytes are held before a step; "
            f"with 1/p of the state it is at most {allowed:.0f}: something is not cut"
        )
    return None


def _specification(stage: int) -> Specification:
    stages = [
        Stage("runs", lambda f: on_ranks(_trains, f, 0, 1, sizes=(1,))),
        Stage("small", lambda f: on_ranks(_trains, f, 1, 1, sizes=(2,))),
        Stage(
            "drawn",
            lambda f: on_ranks(_trains, f, 2) or on_ranks(_accumulates, f, 3) or on_ranks(_begins_alike, f),
        ),
        Stage("bytes", lambda f: on_ranks(_bytes, f, sizes=(3, 4))),
        Stage("memory", lambda f: on_ranks(_memory, f, stage, sizes=(2, 4))),
        Stage("varied", lambda f: on_ranks(_varied, f, sizes=RANKS)),
    ]
    cut = "the optimizer's state" if stage == 1 else "the optimizer's state and the gradients"
    return Specification(
        f"zero{stage}",
        f"Zero{stage}(params, optimizer_cls, comm, **options)",
        f"step() gives the parameters of one process; each rank keeps 1/p of {cut}.",
        tuple(stages),
    )


SPECIFICATIONS = [_specification(1), _specification(2)]
