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


def _case(size: int, seed: int, scale: float) -> list[torch.Tensor]:
    """Return whole q, k, v and dout, [B, HEADS, N, HEAD_DIM]."""
    draw, shape = generator(size, seed), (B, HEADS, size * PIECE, HEAD_DIM)
    *qkv, dout = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4))
    return [*(scale * x for x in qkv), dout]


def _lse(q, k, causal: bool):
    scores = q @ k.transpose(2, 3) / HEAD_DIM**0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf) if causal else scores).logsumexp(3)


def _forward(world, ring_forward, seed: int, causal: bool, scale: float = 1.0) -> str | None:
    p, r = world.size, world.rank
    q, k, v, _ = _case(p, seed, scale)
    got = ring_forward(world, *(x.chunk(p, 2)[r].contiguous() for x in (q, k, v)), causal=causal)
    if not isinstance(got, tuple) or len(got) != 2:
        return f"rank {r}: it returned a {type(got).__name__}; return out and lse"
    mask, wanted = (
        "causal" if causal else "full",
        (plain_attention(q, k, v, causal=causal), _lse(q, k, causal)),
    )
    what = f"rank {r}: the {mask} attention of its queries", f"rank {r}: their log-sum-exp"
    found = [differs(name, x, y.chunk(p, 2)[r], p) for name, x, y in zip(what, got, wanted)]
    return found[0] or found[1]


def _backward(world, ring_backward, seed: int, causal: bool, scale: float = 1.0) -> str | None:
    p, r = world.size, world.rank
    *qkv, dout = _case(p, seed, scale)
    wanted = [x.requires_grad_() for x in qkv]
    out = plain_attention(*wanted, causal=causal)
    out.backward(dout)
    given = [x.detach() for x in (*qkv, out, _lse(*qkv[:2], causal), dout)]
    got = ring_backward(world, *(x.chunk(p, 2)[r].contiguous() for x in given), causal=causal)
    if not isinstance(got, tuple) or len(got) != 3:
        return f"rank {r}: it returned a {type(got).__name__}; return dq, dk and dv"
    for name, x, right in zip("qkv", got, wanted):
        part, grad = right.grad.chunk(p, 2)[r], right.grad
        if words := differs(f"rank {r}: d{name} of its own tokens", x, part, p, whole=grad):
            others = [s for s, y in enumerate(grad.chunk(p, 2)) if differs("", x, y, p, whole=grad) is None]
            return words + (f": it is rank {others[0]}'s" if others else "")
    return None


def _half_bytes(world, half, num_inputs: int, tensors: int, says: str) -> str | None:
    p, x = world.size, torch.ones(B, HEADS, PIECE, HEAD_DIM, dtype=torch.float64)
    inputs = [x] * 3 if num_inputs == 3 else [x, x, x, x, x[..., 0], x]
    world.traffic.reset()
    half(world, *inputs, causal=True)
    of = f"{PIECE * p} tokens of {HEADS} heads of {HEAD_DIM}"
    return wrong_bytes(world.traffic.sent_bytes, tensors * (p - 1) * x.nbytes, world.rank, p, of, says)


def _half(
    name: str, signature: str, body: Callable, num_inputs: int, tensors: int, says: str
) -> Specification:
    stages = (
        Stage("runs", lambda f: on_ranks(body, f, 0, False, sizes=(1,))),
        Stage(
            "small",
            lambda f: on_ranks(body, f, 1, False, sizes=(2,)) or on_ranks(body, f, 1, True, sizes=(2,)),
        ),
        Stage("drawn", lambda f: on_ranks(body, f, 2, True) or on_ranks(body, f, 3, True, 5.0)),
        Stage("bytes", lambda f: on_ranks(_half_bytes, f, num_inputs, tensors, says, sizes=(2, 4))),
    )
    return Specification(name, signature, f"Each rank has a piece of the sequence; it sends {says}.", stages)


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
    _half(
        "ring_forward",
        "ring_forward(comm, q, k, v, causal=True) -> (out, lse)",
        _forward,
        3,
        2,
        "keys and values around a ring",
    ),
    _half(
        "ring_backward",
        "ring_backward(comm, q, k, v, out, lse, dout, causal=True) -> (dq, dk, dv)",
        _backward,
        6,
        4,
        "keys, values and their gradients around a ring",
    ),
    _specification(
        "ring_attention", lambda p: 6 * (p - 1) / p, "keys, values and their gradients around a ring"
    ),
    _specification(
        "ulysses_attention",
        lambda p: 8 * (p - 1) / p**2,
        "an all-to-all of q, k, v and one of out, both ways",
    ),
]
