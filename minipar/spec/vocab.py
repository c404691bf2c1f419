"""Specifications of the embedding and the cross-entropy with a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.varied import AGAIN, BFLOAT16, FLOAT32, KINDS, LARGE, NAN, PLAIN, RANKS, STRIDED, Kind
from minipar.spec.words import first, generator, grad_of, normal, wrong_bytes

APART = Kind("with logits of some tokens 10,000 above those of others")
IMPOSSIBLE = Kind("with logits of -inf that are no targets")
# The probability of a target is nearly 1: computed in bfloat16, with 8 bits, the loss and its gradient would have no
# correct digit. What is returned may be rounded to bfloat16.
CERTAIN = Kind(
    "in bfloat16 with targets far above the rest, where float32 is owed inside", torch.bfloat16, seed=2
)
TWO_ROUNDINGS = 2**-7


def _embedding(world: Comm, embedding: Implementation, seed: int, kind: Kind = PLAIN) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed, kind.seed)
    V, D, T = (200 * p, 8, 301) if kind.large else (5 * p, 3, 7)
    whole = kind.with_nan(kind.rounded(normal(draw, V, D)))
    tokens = torch.randint(V, (2, T), generator=draw)
    tokens[0, :2] = torch.tensor([0, V - 1])
    dy = kind.rounded(normal(draw, 2, T, D))
    mine = kind.given(whole.chunk(p)[r], True)
    given = kind.given(tokens)
    y = embedding(world, given, mine)
    if words := kind.mismatch(f"rank {r}: the rows looked up", y, F.embedding(tokens, whole), p):
        return words
    y.backward(kind.given(dy))
    for what, now, before in (("w", mine, whole.chunk(p)[r]), ("tokens", given, tokens)):
        if words := kind.written(f"rank {r}: {what}", now, before):
            return words
    if kind.nan:
        return None
    want = whole.clone().requires_grad_()
    F.embedding(tokens, want).backward(dy)
    return kind.mismatch(f"rank {r}: the gradient of its rows", mine.grad, grad_of(want).chunk(p)[r], p)


def _loss(
    world: Comm, cross_entropy: Implementation, seed: int, scale: float, kind: Kind = PLAIN
) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed, kind.seed)
    V, N = (100 * p, 41) if kind.large else (4 * p, 6)
    whole = kind.with_nan(kind.rounded(scale * normal(draw, N, V)))
    targets = torch.randint(V, (N,), generator=draw)
    if kind is APART:
        whole += torch.arange(N)[:, None] * 1e4
    if kind is IMPOSSIBLE:
        whole[torch.arange(N), (targets + 1) % V] = -torch.inf
    if kind is CERTAIN:
        whole[torch.arange(N), targets] = whole.amax(1) + 6
        whole = kind.rounded(whole)
    rounding = TWO_ROUNDINGS if kind is CERTAIN else None
    mine = kind.given(whole.chunk(p, 1)[r], True)
    loss = cross_entropy(world, mine, kind.given(targets))
    want = whole.clone().requires_grad_()
    right = F.cross_entropy(want, targets)
    what = f"rank {r}: the loss of logits up to {_largest(whole):.3g}"
    if words := kind.mismatch(what, loss, right, p, rounding=rounding):
        return words
    (2.5 * loss).backward()  # the loss need not be the last function, so its incoming gradient need not be 1
    if words := kind.written(f"rank {r}: its logits", mine, whole.chunk(p, 1)[r]):
        return words
    if kind.nan:
        return None
    (2.5 * right).backward()
    dz, what = grad_of(want), f"rank {r}: the gradient of its logits"
    return kind.mismatch(what, mine.grad, dz.chunk(p, 1)[r], p, dz, rounding)


def _largest(x: Tensor) -> float:
    return x[x.isfinite()].abs().max().item()


def _varied_embedding(world: Comm, embedding: Implementation) -> str | None:
    return first(_embedding(world, embedding, 3, kind) for kind in KINDS)


def _varied_loss(world: Comm, cross_entropy: Implementation) -> str | None:
    kinds = (PLAIN, LARGE, AGAIN, FLOAT32, BFLOAT16, STRIDED, NAN, APART, IMPOSSIBLE, CERTAIN)
    return first(_loss(world, cross_entropy, 4, 3.0, kind) for kind in kinds)


def _three_numbers(world: Comm, cross_entropy: Implementation) -> str | None:
    p, N = world.size, 12 * world.size
    logits = torch.zeros(N, 8, dtype=torch.float64, requires_grad=True)
    world.traffic.reset()
    cross_entropy(world.using("ring"), logits, torch.zeros(N, dtype=torch.int64)).backward()
    formula = 2 * (p - 1) / p * 3 * N * 8
    return wrong_bytes(
        world.traffic.sent_bytes, formula, world.rank, p, f"{N} targets", "three numbers per target"
    )


SPECIFICATIONS = [
    Specification(
        "vocab_embedding",
        "embedding(comm, tokens, w)",
        "Rank r has rows r V/tp ...; every rank gets every token's row.",
        (
            Stage("runs", lambda f: on_ranks(_embedding, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_embedding, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_embedding, f, 2)),
            Stage("varied", lambda f: on_ranks(_varied_embedding, f, sizes=RANKS)),
        ),
    ),
    Specification(
        "vocab_loss",
        "cross_entropy(comm, logits, targets)",
        "The mean cross-entropy, from logits [N, V/tp] that never meet; three numbers per target travel, "
        "in float32 or wider.",
        (
            Stage("runs", lambda f: on_ranks(_loss, f, 0, 1.0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_loss, f, 1, 1.0, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_loss, f, 2, 3.0) or on_ranks(_loss, f, 3, 1e4)),
            Stage("bytes", lambda f: on_ranks(_three_numbers, f, sizes=(2, 4))),
            Stage("varied", lambda f: on_ranks(_varied_loss, f, sizes=RANKS)),
        ),
    ),
]
