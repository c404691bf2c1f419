"""Specification of data parallelism: gradients are averaged, equal on all ranks, and reduced during the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.training import Event, Mixed, Net, chain, loss_of, one_process, recording, samples
from minipar.spec.varied import BFLOAT16, FLOAT32, LARGE, NAN, RANKS
from minipar.spec.words import grad_of, mismatch

STEPS = 3


def _trains(world: Comm, make: Implementation, seed: int, steps: int = STEPS) -> str | None:
    """Check every step's gradients and the final parameters against one process that starts with rank 0's parameters."""
    net = Net(seed + world.rank)
    wrapped = make(net, world)
    for name, p in net.named_parameters():
        if not torch.equal(p, dict(Net(seed).named_parameters())[name]):
            return f"rank {world.rank}: {name} does not start with rank 0's values: copy them to all ranks (comm.broadcast)"
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    want, model = one_process(Net(seed), world.size, 4, steps, torch.optim.SGD, lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped(samples(world.rank, step, 4))).backward()
        finish = getattr(wrapped, "finish_gradients", None)
        if finish is not None:
            finish()
        for name, p in reversed(list(net.named_parameters())):  # in the order of the backward
            what = f"rank {world.rank}: the gradient of {name} in step {step}"
            if words := mismatch(what, p.grad, want[step][name], world.size):
                return words
        optimizer.step()
    for name, p in net.named_parameters():
        what = f"rank {world.rank}: {name} after {steps} steps"
        if words := mismatch(what, p, dict(model.named_parameters())[name], world.size):
            return words
    return None


def _varied(world: Comm, make: Implementation) -> str | None:
    """Check steps of a module with unusual parameters, in several dtypes, a scaled loss and a gradient of the input."""
    r = world.rank
    for kind in (LARGE, FLOAT32, BFLOAT16, NAN):
        net, model = Mixed(9 + r, kind.dtype), Mixed(9, kind.dtype).double()
        wrapped = make(net, world)
        if words := mismatch(f"rank {r}: an integer buffer of rank 0's", net.count, model.count):
            return words
        for step in range(2 if kind is LARGE else 1):
            xs = [kind.rounded(samples(s, step, 4)) for s in range(world.size)]
            xs[0] = kind.with_nan(xs[0])
            x = kind.given(xs[r], True)
            (3 * loss_of(wrapped(x))).backward()
            finish = getattr(wrapped, "finish_gradients", None)
            if finish is not None:
                finish()
            wanted = [x.requires_grad_() for x in xs]
            for one in wanted:
                (3 * loss_of(model(one)) / world.size).backward()
            for name, p in reversed(list(net.named_parameters())):
                want = dict(model.named_parameters())[name].grad
                what = f"rank {r}: the gradient of {name} {list(p.shape)} in step {step}"
                if words := kind.mismatch(what, p.grad, want, world.size):
                    return words
            if words := kind.written(f"rank {r}: the module's input", x, xs[r]):
                return words
            if not kind.nan:
                want = grad_of(wanted[r]) * world.size
                if words := kind.mismatch(
                    f"rank {r}: the gradient of the module's input", x.grad, want, world.size
                ):
                    return words
            for module in (net, model):
                for p in module.parameters():
                    p.grad = None
    return None


def _bytes(world: Comm, make: Implementation) -> str | None:
    net = chain(0, width=64)
    wrapped = make(net, world.using("ring"))
    num_bytes = sum(p.nbytes for p in net.parameters())
    world.traffic.reset()
    _backward(wrapped, torch.ones(2, 64, dtype=torch.float64))
    formula, p = 2 * (world.size - 1) / world.size * num_bytes, world.size
    sent = world.traffic.sent_bytes
    if abs(sent - formula) > 0.02 * formula + 64 * p:  # buckets may be padded
        return (
            f"rank {world.rank}: {p} ranks, {num_bytes} bytes of gradients: it sent {sent}; averaging sends "
            f"2(p-1)/p of them, {formula:.0f}"
        )
    return None


def _backward(wrapped: Callable[[Tensor], Tensor], x: Tensor) -> None:
    loss_of(wrapped(x)).backward()
    finish = getattr(wrapped, "finish_gradients", None)
    if finish is not None:
        finish()


def _overlaps(world: Comm, make: Implementation) -> str | None:
    """Check that buckets start during the backward, without a wait before it ends, and that none is mixed with another.

    Buckets have equal sizes, so that ranks that start them in different orders add other layers' gradients to their own.
    """
    events: list[Event] = []
    net = chain(0, width=20, depth=5)
    for i, layer in enumerate(net):
        weight = layer.get_parameter("weight")
        weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(("gradient", i)))
    wrapped = make(net, recording(world, events), bucket_mb=20 * 21 * 8 / 2**20)  # one layer per bucket
    events.clear()
    _backward(wrapped, samples(world.rank, 0, 20))
    last = max((i for i, (what, _) in enumerate(events) if what == "gradient"), default=-1)
    early = [what for what, _ in events[:last]]
    if "launch" not in early:
        return f"rank {world.rank}: nothing is sent before the last gradient is there: no overlap"
    if "wait" in early:
        return f"rank {world.rank}: it waits before the last gradient is there: no overlap"
    (want,), _ = one_process(chain(0, width=20, depth=5), world.size, 20, 1, torch.optim.SGD, lr=0.1)
    for name, p in reversed(list(net.named_parameters())):
        what = f"rank {world.rank}: with a bucket for each layer, the gradient of {name}"
        if words := mismatch(what, p.grad, want[name], world.size):
            return f"{words}; is every bucket reduced, and are they started in the same order on all ranks?"
    return None


def as_wrapper(average_gradients: Implementation) -> type[nn.Module]:
    """Return a class with DDP's interface that calls `average_gradients(module, comm)`, to check it in the same way."""

    class Averaged(nn.Module):
        def __init__(self, module: nn.Module, comm: Comm, bucket_mb: float = 25.0):
            super().__init__()
            self.module, self.comm = module, comm
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data.copy_(comm.broadcast(tensor.data))

        def forward(self, x: Tensor) -> Any:
            return self.module(x)

        def finish_gradients(self) -> None:
            average_gradients(self.module, self.comm)

    return Averaged


def _averages(world: Comm, average_gradients: Implementation, seed: int, steps: int = STEPS) -> str | None:
    return _trains(world, as_wrapper(average_gradients), seed, steps)


def _varied_averages(world: Comm, average_gradients: Implementation) -> str | None:
    return _varied(world, as_wrapper(average_gradients))


def _averaged_bytes(world: Comm, average_gradients: Implementation) -> str | None:
    return _bytes(world, as_wrapper(average_gradients))


SPECIFICATIONS = [
    Specification(
        "ddp",
        "DDP(module, comm, bucket_mb=25.0)",
        "After backward() every rank has the mean over ranks of the gradients; rank 0's parameters are everybody's.",
        (
            Stage("runs", lambda f: on_ranks(_trains, f, 0, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_trains, f, 1, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_trains, f, 2) or on_ranks(_trains, f, 3)),
            Stage("bytes", lambda f: on_ranks(_bytes, f, sizes=(3, 4))),
            Stage("order", lambda f: on_ranks(_overlaps, f, sizes=(2, 3))),
            Stage("varied", lambda f: on_ranks(_varied, f, sizes=RANKS)),
        ),
    ),
    Specification(
        "average_gradients",
        "average_gradients(module, comm)",
        "After it every rank's .grad is the mean over ranks.",
        (
            Stage("runs", lambda f: on_ranks(_averages, f, 0, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_averages, f, 1, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_averages, f, 2) or on_ranks(_averages, f, 3)),
            Stage("bytes", lambda f: on_ranks(_averaged_bytes, f, sizes=(3, 4))),
            Stage("varied", lambda f: on_ranks(_varied_averages, f, sizes=RANKS)),
        ),
    ),
]
