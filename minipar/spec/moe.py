"""Specification of Switch: routing in groups, capacity, both losses, and experts sharded over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.model.moe import MoE
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, generator

D, HIDDEN = 6, 5


def oracle(router, gate, up, down, capacity_factor: float) -> MoE:
    """Return the one-process layer with these weights, and coefficient 1 for both losses."""
    layer = MoE(D, HIDDEN, len(router), 1, capacity_factor, balance_coef=1.0, z_coef=1.0).double()
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
    router, gate, up, down = new(E, D), new(E, HIDDEN, D), new(E, HIDDEN, D), new(E, D, HIDDEN)
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


def _expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


class DispatchCase:
    """Each rank's rows, sorted by expert, and the weights of 2 p experts. From seed 2 on, one rank has no rows."""

    def __init__(self, size: int, seed: int):
        draw, E = generator(size, seed, 5), 2 * size
        new = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        self.weights = [new(E, *shape) for shape in ((HIDDEN, D), (HIDDEN, D), (D, HIDDEN))]
        self.counts = [torch.randint(4, (E,), generator=draw) for _ in range(size)]
        if seed >= 2:
            self.counts[-1].zero_()
        self.rows = [new(int(counts.sum()), D) for counts in self.counts]
        self.dys = [new(*rows.shape) for rows in self.rows]


def _dispatches(world, dispatch, seed: int) -> str | None:
    p, r, case = world.size, world.rank, DispatchCase(world.size, seed)
    mine = [w.chunk(p)[r].clone().requires_grad_() for w in case.weights]
    x = case.rows[r].clone().requires_grad_()
    y = dispatch(world, x, case.counts[r].clone(), *mine)
    wanted = [rows.clone().requires_grad_() for rows in case.rows]
    whole = [w.clone().requires_grad_() for w in case.weights]
    outs = []
    for rows, counts in zip(wanted, case.counts):
        parts = zip(rows.split(counts.tolist()), *whole)
        outs.append(torch.cat([_expert(*part) for part in parts]))
    if words := differs(f"rank {r}: the experts' results, in the order of its rows,", y, outs[r], p):
        return words
    (y * case.dys[r]).sum().backward()
    sum((out * dy).sum() for out, dy in zip(outs, case.dys)).backward()
    if words := differs(f"rank {r}: the gradient of its rows", x.grad, wanted[r].grad, p):
        return words
    for name, part, right in zip(("gate", "up", "down"), mine, whole):
        what = f"rank {r}: the gradient of its experts' {name}"
        if words := differs(what, part.grad, right.grad.chunk(p)[r], p, whole=right.grad):
            return words
    return None


def _dispatched_bytes(world, dispatch) -> str | None:
    p, r, case = world.size, world.rank, DispatchCase(world.size, 1)
    mine = [w.chunk(p)[r].clone().requires_grad_() for w in case.weights]
    world.traffic.reset()
    x = case.rows[r].clone().requires_grad_()
    dispatch(world, x, case.counts[r].clone(), *mine).sum().backward()
    sent = torch.stack(case.counts).view(p, p, -1).sum(2)  # [from, to]
    away = int(sent[r].sum() + sent[:, r].sum() - 2 * sent[r, r])  # rows out, and others' results back
    rows, counts = 2 * away * D * 8, (p - 1) * 8 * 2 * p
    if not rows <= world.traffic.sent_bytes <= rows + counts:
        return (
            f"rank {r}: {p} ranks: it sent {world.traffic.sent_bytes} bytes; {away} rows of {D} float64 that cross, "
            f"forward and backward, are {rows}, and counts at most {counts}"
        )
    return None


SPECIFICATIONS = [
    Specification(
        "dispatch",
        "dispatch(comm, rows, counts, gate, up, down)",
        "Each row goes to the rank of its expert, and its result comes back to its place.",
        (
            Stage("runs", lambda f: on_ranks(_dispatches, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_dispatches, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_dispatches, f, 2) or on_ranks(_dispatches, f, 3)),
            Stage("bytes", lambda f: on_ranks(_dispatched_bytes, f, sizes=(2, 4))),
        ),
    ),
    Specification(
        "switch",
        "switch(comm, x, router, gate, up, down, capacity_factor) -> (y, balance_loss, z_loss, dropped)",
        "Each token's first expert answers, if it has room; the experts are spread over ranks, and nothing depends on how.",
        (
            Stage("runs", lambda f: on_ranks(_right, f, 0, 1.25, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_right, f, 1, 4.0, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_right, f, 2, 1.25, 2) or on_ranks(_right, f, 3, 0.5, 2)),
        ),
    ),
]
