"""Specification of Switch: routing in groups, capacity, both losses, and experts sharded over ranks."""

from __future__ import annotations

import torch

from minipar.model.moe import MoE
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, generator

D, F = 6, 5


def oracle(router, gate, up, down, capacity_factor: float) -> MoE:
    """Return the one-process layer with these weights, and coefficient 1 for both losses."""
    layer = MoE(D, F, len(router), 1, capacity_factor, balance_coef=1.0, z_coef=1.0).double()
    with torch.no_grad():
        for mine, given in zip(
            (layer.router.weight, layer.experts.gate, layer.experts.up, layer.experts.down),
            (router, gate, up, down),
        ):
            mine.copy_(given)
    return layer


def _right(world, switch, seed: int, capacity_factor: float, samples: int) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed)
    E, T = 2 * p, 7
    new = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    router, gate, up, down = new(E, D), new(E, F, D), new(E, F, D), new(E, D, F)
    batches, dys = ([new(1 if rank else samples, T, D) for rank in range(p)] for _ in range(2))
    mine = [w.chunk(p)[r].clone().requires_grad_() for w in (gate, up, down)]
    own_router, x = router.clone().requires_grad_(), batches[r].clone().requires_grad_()
    y, balance, z, dropped = switch(world, x, own_router, *mine, capacity_factor)
    layer = oracle(router, gate, up, down, capacity_factor)
    wanted = [b.clone().requires_grad_() for b in batches]
    outs = [layer(b) for b in wanted]
    want, metrics = outs[r]
    (y * dys[r]).sum().add(balance + z).backward()
    sum((out * dy).sum() + m.balance_loss + m.z_loss for (out, m), dy in zip(outs, dys)).backward()
    routers = world.all_reduce(own_router.grad)
    if words := differs(f"rank {r}: the output", y, want, p):
        return words
    if int(dropped) != int(metrics.dropped):
        right = f"with capacity_factor={capacity_factor} it is {int(metrics.dropped)}"
        return f"rank {r}: {int(dropped)} tokens are dropped; {right}"
    for name, got, right in (("balance loss", balance, metrics.balance_loss), ("z-loss", z, metrics.z_loss)):
        if words := differs(f"rank {r}: the {name}", got, right, p):
            return words
    if words := differs(f"rank {r}: the gradient of x", x.grad, wanted[r].grad, p):
        return words
    whole = (layer.experts.gate, layer.experts.up, layer.experts.down)
    for name, part, right in zip(("gate", "up", "down"), mine, whole):
        if words := differs(
            f"rank {r}: the gradient of its experts' {name}", part.grad, right.grad.chunk(p)[r], p
        ):
            return words
    return differs(
        f"rank {r}: the router's gradient, summed over ranks", routers, layer.router.weight.grad, p
    )


SPECIFICATIONS = [
    Specification(
        "switch",
        "switch(comm, x, router, gate, up, down, capacity_factor) -> (y, balance_loss, z_loss, dropped)",
        "Each token's first expert answers, if it has room; the experts are spread over ranks, and nothing depends on how.",
        (
            Stage("runs", lambda f: on_ranks(_right, f, 0, 1.25, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_right, f, 1, 4.0, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_right, f, 2, 1.25, 2) or on_ranks(_right, f, 3, 0.5, 2)),
        ),
    )
]
