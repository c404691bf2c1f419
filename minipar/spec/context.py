"""Specifications of attention over a sharded sequence: the numbers of one process, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from minipar.model.attention import plain_attention
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, generator, wrong_bytes

B, HEADS, PIECE, HEAD_DIM = 2, 12, 4, 3


def _right(world, attention, seed: int, causal: bool, scale: float = 1.0) -> str | None:
    p, r, draw = world.size, world.rank, generator(world.size, seed)
    shape = (B, HEADS, p * PIECE, HEAD_DIM)
    whole = [scale * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)]
    dout = torch.randn(shape, generator=draw, dtype=torch.float64)
    mine = [x.chunk(p, 2)[r].clone().requires_grad_() for x in whole]
    out = attention(world, *mine, causal=causal)
    wanted = [x.clone().requires_grad_() for x in whole]
    want = plain_attention(*wanted, causal=causal)
    mask = "causal" if causal else "full"
    if words := differs(f"rank {r}: the {mask} attention of its queries", out, want.chunk(p, 2)[r], p):
        return words
    out.backward(dout.chunk(p, 2)[r].contiguous())
    want.backward(dout)
    for name, x, right in zip("qkv", mine, wanted):
        what, part = f"rank {r}: the gradient of its {name}", right.grad.chunk(p, 2)[r]
        if words := differs(what, x.grad, part, p, whole=right.grad):
            return words
    return None


def _bytes(world, attention, formula: Callable[[int], float], says: str) -> str | None:
    p = world.size
    shape = (B, HEADS, PIECE, HEAD_DIM)
    q, k, v = (torch.ones(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    world.traffic.reset()
    attention(world, q, k, v, causal=True).sum().backward()
    of = f"{PIECE * p} tokens of {HEADS} heads of {HEAD_DIM}"
    return wrong_bytes(world.traffic.sent_bytes, formula(p) * p * q.nbytes, world.rank, p, of, says)


def _specification(name: str, formula, says: str) -> Specification:
    stages = (
        Stage("runs", lambda f: on_ranks(_right, f, 0, False, sizes=(1,))),
        Stage(
            "small",
            lambda f: on_ranks(_right, f, 1, False, sizes=(2,)) or on_ranks(_right, f, 1, True, sizes=(2,)),
        ),
        Stage("drawn", lambda f: on_ranks(_right, f, 2, True) or on_ranks(_right, f, 3, True, 5.0)),
        Stage("bytes", lambda f: on_ranks(partial(_bytes, formula=formula, says=says), f, sizes=(2, 4))),
    )
    signature = f"{name}(comm, q, k, v, causal=True), [batch, heads, tokens / P, head_dim]"
    return Specification(
        name, signature, "Each rank has a piece of the sequence, and gets its part of the attention.", stages
    )


SPECIFICATIONS = [
    _specification(
        "ring_attention", lambda p: 6 * (p - 1) / p, "keys, values and their gradients around a ring"
    ),
    _specification(
        "ulysses_attention",
        lambda p: 8 * (p - 1) / p**2,
        "an all-to-all of q, k, v and one of out, both ways",
    ),
]
