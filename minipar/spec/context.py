"""Specifications of attention over a sharded sequence: results equal to one process's, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.model.attention import plain_attention
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Specification, Stage, on_ranks
from minipar.spec.varied import FLOAT32, KINDS, NAN, PLAIN, RANKS, Kind
from minipar.spec.words import first, generator, grad_of, mismatch, normal, wrong_bytes

LATE = Kind("with scores of hundreds in later blocks alone")
B, HEADS, PIECE, HEAD_DIM = 2, 12, 4, 3
# Multiplies queries and keys, so that scores are in the hundreds: exp overflows unless the maximum is subtracted.
HUNDREDS = 30.0


def _right(
    world: Comm,
    attention: Implementation,
    seed: int,
    causal: bool,
    scale: float = 1.0,
    kind: Kind = PLAIN,
) -> str | None:
    p, r = world.size, world.rank
    *whole, dout = _case(p, seed, scale, kind)
    mine = [kind.given(x.chunk(p, 2)[r], True) for x in whole]
    out = attention(world, *mine, causal=causal)
    wanted = [x.clone().requires_grad_() for x in whole]
    want = plain_attention(wanted[0], wanted[1], wanted[2], causal)
    mask = "causal" if causal else "full"
    if words := kind.mismatch(f"rank {r}: the {mask} attention of its queries", out, want.chunk(p, 2)[r], p):
        return words
    out.backward(kind.given(dout.chunk(p, 2)[r]))
    for name, x, before in zip("qkv", mine, whole):
        if words := kind.written(f"rank {r}: its {name}", x, before.chunk(p, 2)[r]):
            return words
    if kind.nan:
        return None
    want.backward(dout)
    for name, x, right in zip("qkv", mine, wanted):
        what, part = f"rank {r}: the gradient of its {name}", grad_of(right).chunk(p, 2)[r]
        if words := kind.mismatch(what, x.grad, part, p, whole=right.grad):
            return words
    return None


def _varied(world: Comm, implementation: Implementation, body: Body) -> str | None:
    full = (FLOAT32, NAN)  # without a causal mask, unlike the other kinds
    return first(body(world, implementation, 5, kind not in full, kind=kind) for kind in (*KINDS, LATE))


def _bytes(world: Comm, attention: Implementation, formula: Callable[[int], float], says: str) -> str | None:
    p = world.size
    shape = (B, HEADS, PIECE, HEAD_DIM)
    q, k, v = (torch.ones(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    world.traffic.reset()
    attention(world, q, k, v, causal=True).sum().backward()
    of = f"{PIECE * p} tokens of {HEADS} heads of {HEAD_DIM}"
    return wrong_bytes(world.traffic.sent_bytes, formula(p) * p * q.nbytes, world.rank, p, of, says)


def _case(size: int, seed: int, scale: float, kind: Kind) -> list[Tensor]:
    """Return q, k, v and dout of the whole sequence, [B, HEADS, N, HEAD_DIM]."""
    heads, piece = (HEADS if HEADS % size == 0 else size), (17 if kind.large else PIECE)
    draw, shape = generator(size, seed, kind.seed), (B, heads, size * piece, HEAD_DIM)
    q, k, v, dout = (normal(draw, *shape) for _ in range(4))
    if kind is LATE:  # the last block's scores are hundreds above the first one's
        q, k = q.abs() * torch.arange(size * piece)[:, None], k.abs() * torch.arange(size * piece)[:, None]
    q, k, v = (kind.rounded(scale * x) for x in (q, k, v))
    return [kind.with_nan(q), k, v, kind.rounded(dout)]


def _lse(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(2, 3) / HEAD_DIM**0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.logsumexp(scores.masked_fill(later, -torch.inf) if causal else scores, 3)


def _forward(
    world: Comm,
    ring_forward: Implementation,
    seed: int,
    causal: bool,
    scale: float = 1.0,
    kind: Kind = PLAIN,
) -> str | None:
    p, r = world.size, world.rank
    q, k, v, _ = _case(p, seed, scale, kind)
    mine = [kind.given(x.chunk(p, 2)[r]) for x in (q, k, v)]
    got = ring_forward(world, *mine, causal=causal)
    if not isinstance(got, tuple) or len(got) != 2:
        return f"rank {r}: it returned a {type(got).__name__}; return out and lse"
    mask, wanted = (
        "causal" if causal else "full",
        (plain_attention(q, k, v, causal=causal), _lse(q, k, causal)),
    )
    what = f"rank {r}: the {mask} attention of its queries", f"rank {r}: their log-sum-exp"
    found = [kind.mismatch(name, x, y.chunk(p, 2)[r], p) for name, x, y in zip(what, got, wanted)]
    for name, x, before in zip("qkv", mine, (q, k, v)):
        found.append(kind.written(f"rank {r}: its {name}", x, before.chunk(p, 2)[r]))
    return first(found)


def _backward(
    world: Comm,
    ring_backward: Implementation,
    seed: int,
    causal: bool,
    scale: float = 1.0,
    kind: Kind = PLAIN,
) -> str | None:
    p, r = world.size, world.rank
    q, k, v, dout = _case(p, seed, scale, kind)
    wanted = [x.requires_grad_() for x in (q, k, v)]
    out = plain_attention(q, k, v, causal=causal)
    out.backward(dout)
    given = [x.detach() for x in (q, k, v, out, _lse(q, k, causal), dout)]
    mine = [kind.given(x.chunk(p, 2)[r]) for x in given]
    got = ring_backward(world, *mine, causal=causal)
    if not isinstance(got, tuple) or len(got) != 3:
        return f"rank {r}: it returned a {type(got).__name__}; return dq, dk and dv"
    for name, x, before in zip(("q", "k", "v", "out", "lse", "dout"), mine, given):
        if words := kind.written(f"rank {r}: its {name}", x, before.chunk(p, 2)[r]):
            return words
    for name, x, right in zip("qkv", got, wanted):
        grad = grad_of(right)
        part = grad.chunk(p, 2)[r]
        if kind.nan:  # a block that masks a key may or may not give it a nan gradient
            if name == "q" and not (isinstance(x, Tensor) and x[part.isnan()].isnan().all()):
                return f"rank {r}: dq of a query that has a nan is finite"
            continue
        if words := kind.mismatch(f"rank {r}: d{name} of its own tokens", x, part, p, whole=grad):
            others = [s for s, y in enumerate(grad.chunk(p, 2)) if mismatch("", x, y, p, whole=grad) is None]
            return words + (f": it is rank {others[0]}'s" if others else "")
    return None


def _half_bytes(world: Comm, half: Implementation, num_inputs: int, tensors: int, says: str) -> str | None:
    p, x = world.size, torch.ones(B, HEADS, PIECE, HEAD_DIM, dtype=torch.float64)
    inputs = [x] * 3 if num_inputs == 3 else [x, x, x, x, x[..., 0], x]
    world.traffic.reset()
    half(world, *inputs, causal=True)
    of = f"{PIECE * p} tokens of {HEADS} heads of {HEAD_DIM}"
    return wrong_bytes(world.traffic.sent_bytes, tensors * (p - 1) * x.nbytes, world.rank, p, of, says)


def _half(name: str, signature: str, body: Body, num_inputs: int, tensors: int, says: str) -> Specification:
    drawn = [(2, True), (3, True, 5.0), (4, False, HUNDREDS)]
    stages = (
        Stage("runs", lambda f: on_ranks(body, f, 0, False, sizes=(1,))),
        Stage(
            "small",
            lambda f: on_ranks(body, f, 1, False, sizes=(2,)) or on_ranks(body, f, 1, True, sizes=(2,)),
        ),
        Stage("drawn", lambda f: first(on_ranks(body, f, *case) for case in drawn)),
        Stage("bytes", lambda f: on_ranks(_half_bytes, f, num_inputs, tensors, says, sizes=(2, 4))),
        Stage("varied", lambda f: on_ranks(_varied, f, body, sizes=RANKS)),
    )
    return Specification(name, signature, f"Each rank has a piece of the sequence; it sends {says}.", stages)


def _specification(name: str, formula: Callable[[int], float], says: str) -> Specification:
    drawn = [(2, True), (3, True, 5.0), (4, False, HUNDREDS)]
    stages = (
        Stage("runs", lambda f: on_ranks(_right, f, 0, False, sizes=(1,))),
        Stage(
            "small",
            lambda f: on_ranks(_right, f, 1, False, sizes=(2,)) or on_ranks(_right, f, 1, True, sizes=(2,)),
        ),
        Stage("drawn", lambda f: first(on_ranks(_right, f, *case) for case in drawn)),
        Stage("bytes", lambda f: on_ranks(partial(_bytes, formula=formula, says=says), f, sizes=(2, 4))),
        Stage("varied", lambda f: on_ranks(_varied, f, _right, sizes=RANKS)),
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
