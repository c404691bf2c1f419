"""Specification of data parallelism: gradients are averaged, equal on all ranks, and reduced during the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from minipar.comm import Comm
from minipar.spec.counted import recording
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, every
from minipar.spec.training import (
    SGD,
    Branches,
    Options,
    Trainee,
    chain,
    frozen,
    loss_of,
    or_refused,
    samples,
    stages,
    trains,
)


def _start(make: Implementation, net: nn.Module, world: Comm, cls: Any, options: Options) -> Trainee:
    wrapped = make(net, world, bucket_mb=getattr(net, "bucket_mb", 25.0))
    optimizer = cls([p for p in wrapped.parameters() if p.requires_grad], **options)
    return Trainee(wrapped, optimizer, finish=getattr(wrapped, "finish_gradients", lambda: None))


WIDTH = 20
LAYER_BYTES = WIDTH * (WIDTH + 1) * 8


class Layers(nn.Sequential):
    """Five layers, each of which is a bucket."""

    bucket_mb = LAYER_BYTES / 2**20

    def __init__(self, seed: int):
        super().__init__(*chain(seed, WIDTH, 5))


def _overlaps(world: Comm, make: Implementation) -> str | None:
    """Check that buckets start during the backward, without a wait before it ends."""
    events: list[tuple[str, int]] = []
    net = Layers(0)
    for layer in net.children():
        weight = layer.get_parameter("weight")
        weight.register_post_accumulate_grad_hook(lambda _: events.append(("gradient", 0)))
    with recording(world, events) as comm:
        trainee = _start(make, net, comm, *SGD)
        for _ in range(2):  # buckets may be made in the first backward
            net.zero_grad()
            loss = loss_of(trainee.forward(samples(world.rank, 0, WIDTH)))
            events.clear()
            loss.backward()
            trainee.finish()
    last = max((i for i, (what, _) in enumerate(events) if what == "gradient"), default=0)
    if sum(num_bytes for what, num_bytes in events[:last] if what == "launch") < LAYER_BYTES / 2:
        return "nothing is sent before the last gradient is there: no overlap"
    if ("wait", 0) in events[:last]:
        return "it waits before the last gradient is there: no overlap"
    return None


def _buckets(world: Comm, make: Implementation) -> str | None:
    """Check that no bucket is mixed with another.

    Buckets have equal sizes, so that ranks that start them in different orders add other layers' gradients to their own.
    """
    words = trains(world, make, _start, (Layers,), width=WIDTH)
    return words and (
        f"{words}: with a bucket for each layer; is every bucket reduced, and are they started in the same order on all "
        "ranks?"
    )


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


def _averaged(average_gradients: Implementation, *args: Any) -> Trainee:
    return _start(as_wrapper(average_gradients), *args)


FROZEN = partial(or_refused, start=_start, makes=(frozen,), moves=("train", "train"))
BRANCHES = partial(trains, start=_start, makes=(Branches, Branches), moves=("train", "twice"), seed=4)
ORDER = Stage("order", every(_overlaps, _buckets, BRANCHES), (2, 3))

SPECIFICATIONS = [
    Specification(
        "ddp",
        "DDP(module, comm, bucket_mb=25.0)",
        "After backward() every rank has the mean over ranks of the gradients; rank 0's parameters are everybody's. Frozen "
        "parameters may be refused, by an exception; parameters that get no gradient, and two forwards before a backward, "
        "are not asked for.",
        stages(_start, FROZEN, between=[ORDER]),
    ),
    Specification(
        "average_gradients",
        "average_gradients(module, comm)",
        "After it every rank's .grad is the mean over ranks.",
        stages(_averaged),
    ),
]
