"""Specifications of the embedding and the cross-entropy with a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, generator, wrong_bytes


def _embedding(world, embedding, seed: int) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed)
    V, D = 5 * p, 3
    whole = torch.randn(V, D, generator=draw, dtype=torch.float64)
    tokens = torch.randint(V, (2, 7), generator=draw)
    dy = torch.randn(2, 7, D, generator=draw, dtype=torch.float64)
    mine = whole.chunk(p)[r].clone().requires_grad_()
    y = embedding(world, tokens, mine)
    if words := differs(f"rank {r}: the rows looked up", y, F.embedding(tokens, whole), p):
        return words
    y.backward(dy)
    want = whole.clone().requires_grad_()
    F.embedding(tokens, want).backward(dy)
    return differs(f"rank {r}: the gradient of its rows", mine.grad, want.grad.chunk(p)[r], p)


def _loss(world, cross_entropy, seed: int, scale: float) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed)
    V, N = 4 * p, 6
    whole = scale * torch.randn(N, V, generator=draw, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=draw)
    mine = whole.chunk(p, 1)[r].clone().requires_grad_()
    loss = cross_entropy(world, mine, targets)
    want = whole.clone().requires_grad_()
    right = F.cross_entropy(want, targets)
    if words := differs(f"rank {r}: the loss of logits up to {whole.abs().max():.3g}", loss, right, p):
        return words
    loss.backward()
    right.backward()
    return differs(f"rank {r}: the gradient of its logits", mine.grad, want.grad.chunk(p, 1)[r], p)


def _three_numbers(world, cross_entropy) -> str | None:
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
        ),
    ),
    Specification(
        "vocab_loss",
        "cross_entropy(comm, logits, targets)",
        "The mean cross-entropy, from logits [N, V/tp] that never meet; three numbers per target travel.",
        (
            Stage("runs", lambda f: on_ranks(_loss, f, 0, 1.0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_loss, f, 1, 1.0, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_loss, f, 2, 3.0) or on_ranks(_loss, f, 3, 1e4)),
            Stage("bytes", lambda f: on_ranks(_three_numbers, f, sizes=(2, 4))),
        ),
    ),
]
