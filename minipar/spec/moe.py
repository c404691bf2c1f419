"""Specifications of dispatch, and of Switch: routing, capacity, both losses, and experts sharded over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.model.moe import MoE
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.varied import AGAIN, FLOAT32, KINDS, LARGE, PLAIN, RANKS, STRIDED, Kind
from minipar.spec.words import first, generator, grad_of, normal

CERTAIN = Kind("with logits of hundreds", scale=300.0)

D, HIDDEN = 6, 5


def oracle(router: Tensor, gate: Tensor, up: Tensor, down: Tensor, capacity_factor: float) -> MoE:
    """Return a one-process layer with these weights, and with coefficient 1 for both losses."""
    layer = MoE(D, HIDDEN, len(router), 1, capacity_factor, balance_coef=1.0, z_coef=1.0).double()
    with torch.no_grad():
        for mine, given in zip(
            (layer.router.weight, layer.experts.gate, layer.experts.up, layer.experts.down),
            (router, gate, up, down),
        ):
            mine.copy_(given)
    return layer


def _right(
    world: Comm,
    switch: Implementation,
    seed: int,
    capacity_factor: float,
    samples: int,
    tokens: int = 7,
    kind: Kind = PLAIN,
) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed, kind.seed)
    E, T = 2 * p, tokens

    def new(*shape: int) -> Tensor:
        return kind.rounded(normal(draw, *shape))

    router, gate, up, down = new(E, D), new(E, HIDDEN, D), new(E, HIDDEN, D), new(E, D, HIDDEN)
    batches, dys = ([new(1 if rank else samples, T, D) for rank in range(p)] for _ in range(2))
    router *= kind.scale
    mine = [kind.given(w.chunk(p)[r], True) for w in (gate, up, down)]
    own_router, x = kind.given(router, True), kind.given(batches[r], True)
    y, balance, z, dropped = switch(world, x, own_router, *mine, capacity_factor)
    layer = oracle(router, gate, up, down, capacity_factor)
    wanted = [b.clone().requires_grad_() for b in batches]
    outs = [layer(b) for b in wanted]
    want, metrics = outs[r]
    (y * kind.given(dys[r])).sum().add(balance + z).backward()
    for (out, m), dy in zip(outs, dys):
        ((out * dy).sum() + m.balance_loss + m.z_loss).backward()
    routers = world.all_reduce(grad_of(own_router).contiguous())
    if words := kind.written(f"rank {r}: x", x, batches[r]):
        return words
    if words := kind.mismatch(f"rank {r}: the output", y, want, p):
        return words
    if int(dropped) != int(metrics.dropped):
        right = f"with capacity_factor={capacity_factor} it is {int(metrics.dropped)}"
        return f"rank {r}: {int(dropped)} tokens are dropped; {right}"
    for name, got, right in (("balance loss", balance, metrics.balance_loss), ("z-loss", z, metrics.z_loss)):
        if words := kind.mismatch(f"rank {r}: the {name}", got, right, p):
            return words
    if words := kind.mismatch(f"rank {r}: the gradient of x", x.grad, wanted[r].grad, p):
        return words
    whole = (layer.experts.gate, layer.experts.up, layer.experts.down)
    for name, part, weight in zip(("gate", "up", "down"), mine, whole):
        what = f"rank {r}: the gradient of its experts' {name}"
        if words := kind.mismatch(what, part.grad, grad_of(weight).chunk(p)[r], p):
            return words
    return kind.mismatch(
        f"rank {r}: the router's gradient, summed over ranks", routers, layer.router.weight.grad, p
    )


def _expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


class DispatchCase:
    """Each rank's rows, sorted by expert, and the weights of 2p experts. From seed 2 on, the last rank has no rows."""

    def __init__(self, size: int, seed: int, kind: Kind = PLAIN):
        draw, E = generator(size, seed, 5), 2 * size

        def new(*shape: int) -> Tensor:
            return kind.rounded(normal(draw, *shape))

        self.weights = [new(E, *shape) for shape in ((HIDDEN, D), (HIDDEN, D), (D, HIDDEN))]
        most = 400 if kind.large else 4
        self.counts = [torch.randint(most, (E,), generator=draw) for _ in range(size)]
        if seed >= 2:
            self.counts[-1].zero_()
        if kind.seed:  # the same counts, but other rows
            draw = generator(size, seed, kind.seed)
        self.rows = [new(int(counts.sum()), D) for counts in self.counts]
        self.rows[0] = kind.with_nan(self.rows[0])
        self.dys = [new(*rows.shape) for rows in self.rows]


def _dispatches(world: Comm, dispatch: Implementation, seed: int, kind: Kind = PLAIN) -> str | None:
    p, r, case = world.size, world.rank, DispatchCase(world.size, seed, kind)
    mine = [kind.given(w.chunk(p)[r], True) for w in case.weights]
    x = kind.given(case.rows[r], True)
    y = dispatch(world, x, kind.given(case.counts[r]), *mine)
    wanted = [rows.clone().requires_grad_() for rows in case.rows]
    whole = [w.clone().requires_grad_() for w in case.weights]
    outs = []
    for rows, counts in zip(wanted, case.counts):
        parts = zip(rows.split(counts.tolist()), *whole)
        outs.append(torch.cat([_expert(*part) for part in parts]))
    if words := kind.mismatch(f"rank {r}: the experts' results, in the order of its rows,", y, outs[r], p):
        return words
    (y * kind.given(case.dys[r])).sum().backward()
    if words := kind.written(f"rank {r}: its rows", x, case.rows[r]):
        return words
    if kind.nan:
        return None
    for out, dy in zip(outs, case.dys):
        out.backward(dy)
    if words := kind.mismatch(f"rank {r}: the gradient of its rows", x.grad, wanted[r].grad, p):
        return words
    for name, part, right in zip(("gate", "up", "down"), mine, whole):
        what = f"rank {r}: the gradient of its experts' {name}"
        if words := kind.mismatch(what, part.grad, grad_of(right).chunk(p)[r], p, whole=right.grad):
            return words
    return None


def _varied_rows(world: Comm, dispatch: Implementation) -> str | None:
    return first(_dispatches(world, dispatch, 1, kind) for kind in KINDS)


def _varied_tokens(world: Comm, switch: Implementation) -> str | None:
    kinds = [(1.25, kind) for kind in (PLAIN, FLOAT32, STRIDED, CERTAIN)] + [(0.5, LARGE), (0.5, AGAIN)]
    return first(
        _right(world, switch, 5, factor, 2, 120 if kind.large else 7, kind) for factor, kind in kinds
    )


def _dispatched_bytes(world: Comm, dispatch: Implementation) -> str | None:
    p, r, case = world.size, world.rank, DispatchCase(world.size, 1)
    mine = [w.chunk(p)[r].clone().requires_grad_() for w in case.weights]
    world.traffic.reset()
    x = case.rows[r].clone().requires_grad_()
    dispatch(world, x, case.counts[r].clone(), *mine).sum().backward()
    sent = torch.stack(case.counts).view(p, p, -1).sum(2)  # [from, to]
    # Its rows to other ranks, and results of other ranks' rows back to them.
    away = int(sent[r].sum() + sent[:, r].sum() - 2 * sent[r, r])
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
            Stage("varied", lambda f: on_ranks(_varied_rows, f, sizes=RANKS)),
        ),
    ),
    Specification(
        "switch",
        "switch(comm, x, router, gate, up, down, capacity_factor) -> (y, balance_loss, z_loss, dropped)",
        "Each token's first expert answers, if it has room; the experts are spread over ranks, and nothing depends on how.",
        (
            Stage("runs", lambda f: on_ranks(_right, f, 0, 1.25, 1, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_right, f, 1, 4.0, 1, sizes=(2,))),
            # 200 tokens, 4 experts and a factor of 1.1 give a capacity of 55; in floats, 50 * 1.1 would round up to 56.
            Stage(
                "drawn",
                lambda f: (
                    on_ranks(_right, f, 2, 1.25, 2)
                    or on_ranks(_right, f, 3, 0.5, 2)
                    or on_ranks(_right, f, 4, 1.1, 1, 200, sizes=(2,))
                ),
            ),
            Stage("varied", lambda f: on_ranks(_varied_tokens, f, sizes=RANKS)),
        ),
    ),
]
