"""Specification of FSDP: one process's results, 16/p bytes held per parameter, 3 (p-1)/p P elements sent, units freed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import chain, loss_of, one_process, samples
from minipar.spec.varied import BFLOAT16, FLOAT32, LARGE, NAN, RANKS
from minipar.spec.words import grad_of, mismatch
from minipar.support.live_bytes import LiveBytes

WIDTH = 5
PADDING_BYTES = 512  # largest padding allowed per chunk


def _trains(world: Comm, make: Implementation, seed: int, steps: int = 3) -> str | None:
    """Check every step's output, and the norm of the gradient over all shards, against one process."""
    fsdp = make(chain(seed + world.rank, WIDTH), world, nn.Linear)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.3)
    history, _ = one_process(chain(seed), world.size, WIDTH, steps, torch.optim.SGD, lr=0.3)
    model = chain(seed)
    oracle = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        out = fsdp(samples(world.rank, step, WIDTH))
        what = f"rank {world.rank}: the output of step {step}"
        if words := mismatch(what, out, model(samples(world.rank, step, WIDTH)), world.size, rtol=1e-9):
            return words + (
                "" if step else ": rank 0's parameters should be everybody's; broadcast them in __init__"
            )
        loss_of(out).backward()
        squares = world.all_reduce(_squares(p.grad for p in fsdp.parameters() if p.grad is not None))
        want = _squares(history[step].values())
        what = f"rank {world.rank}: the gradient's length, over all shards, in step {step}"
        if words := mismatch(what, squares.sqrt(), want.sqrt(), world.size, rtol=1e-9):
            return words
        optimizer.step()
        for p, g in zip(model.parameters(), history[step].values()):
            p.grad = g
        oracle.step()
    return None


def _varied(world: Comm, make: Implementation) -> str | None:
    """Check two backwards that accumulate gradients, then a step, for large units in several dtypes, with a scaled loss."""
    r, p = world.rank, world.size
    for kind in (LARGE, FLOAT32, BFLOAT16, NAN):
        fsdp, model = (
            make(chain(7 + r, 48, 2).to(kind.dtype), world, nn.Linear),
            chain(7, 48, 2).to(kind.dtype).double(),
        )
        lr = 10.0 if not kind.nan else 0.0  # large: no gradient error is lost in rounding parameters
        optimizer, oracle = (torch.optim.SGD(m.parameters(), lr=lr) for m in (fsdp, model))
        for backward in range(2):
            xs = [kind.rounded(samples(s, backward, 48)) for s in range(p)]
            if backward:
                xs[0] = kind.with_nan(xs[0])
            x, wanted = kind.given(xs[r], True), [x.requires_grad_() for x in xs]
            out = fsdp(x)
            if words := kind.mismatch(f"rank {r}: the output", out, model(wanted[r]), p):
                return words
            (3 * loss_of(out)).backward()
            for one in wanted:
                (3 * loss_of(model(one)) / p).backward()
            if kind.nan:
                continue
            if words := kind.mismatch(
                f"rank {r}: the gradient of the input", x.grad, grad_of(wanted[r]) * p, p
            ):
                return words
        squares = world.all_reduce(_squares(w.grad.double() for w in fsdp.parameters() if w.grad is not None))
        want = _squares(grad_of(w) for w in model.parameters())
        what = f"rank {r}: the gradient's length, over all shards, after two backwards"
        if words := kind.mismatch(what, squares.sqrt().to(kind.dtype), want.sqrt(), p):
            return words
        if kind.nan:
            continue
        optimizer.step()
        oracle.step()
        x = kind.rounded(samples(r, 2, 48))
        if words := kind.mismatch(f"rank {r}: the output after a step", fsdp(kind.given(x)), model(x), p):
            return words
    return None


def _squares(grads: Iterable[Tensor]) -> Tensor:
    return torch.tensor([sum(g.square().sum().item() for g in grads)], dtype=torch.float64)


def _bytes(world: Comm, make: Implementation) -> str | None:
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
            Stage("varied", lambda f: on_ranks(_varied, f, sizes=RANKS)),
        ),
    )
]
