"""Specifications of attention over a sharded sequence: results equal to one process's, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.spec.question import VARIED_SEED, Given, Question, sends, specification
from minipar.spec.specification import Specification
from minipar.spec.varied import FLOAT32, KINDS, NAN, Kind
from minipar.spec.words import generator, normal

LATE = Kind("with scores of hundreds in later blocks alone")
B, HEADS, PIECE, HEAD_DIM = 2, 12, 4, 3
# By seed: whether it is causal, and a factor on queries and keys. With 30, scores are in the hundreds, and exp overflows
# unless the maximum is subtracted.
CASES = [(False, 1.0), (True, 1.0), (True, 1.0), (True, 5.0), (False, 30.0)]
CAUSAL = {"causal": True}
SIGNATURE = "(comm, q, k, v, causal=True), [batch, heads, tokens / P, head_dim]"


def _whole(size: int, seed: int, kind: Kind) -> list[Tensor]:
    """Return q, k, v and dout of the whole sequence, [B, HEADS, N, HEAD_DIM]."""
    scale = CASES[seed][1] if seed < VARIED_SEED else 1.0
    heads, piece = (HEADS if HEADS % size == 0 else size), (17 if kind.large else PIECE)
    draw, shape = generator(size, seed, kind.seed), (B, heads, size * piece, HEAD_DIM)
    q, k, v, dout = (normal(draw, *shape) for _ in range(4))
    if kind == LATE:  # the last block's scores are hundreds above the first one's
        q, k = q.abs() * torch.arange(size * piece)[:, None], k.abs() * torch.arange(size * piece)[:, None]
    q, k, v = (kind.rounded(scale * x) for x in (q, k, v))
    return [kind.with_nan(q), k, v, kind.rounded(dout)]


def _causal(seed: int, kind: Kind) -> bool:
    return CASES[seed][0] if seed < VARIED_SEED else kind not in (FLOAT32, NAN)


def _cut(whole: dict[str, Tensor], size: int, seed: int, kind: Kind) -> Given:
    causal = _causal(seed, kind)
    return [
        {**{name: x.chunk(size, 2)[r].clone() for name, x in whole.items()}, "causal": causal}
        for r in range(size)
    ]


def _draw(size: int, seed: int, kind: Kind) -> Given:
    return _cut(dict(zip("qkv", _whole(size, seed, kind))), size, seed, kind)


def _draw_backward(size: int, seed: int, kind: Kind) -> Given:
    q, k, v, dout = _whole(size, seed, kind)
    causal = _causal(seed, kind)
    out, lse = plain_attention(q, k, v, causal), _lse(q, k, causal)
    return _cut(dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout), size, seed, kind)


def _joined(given: Given) -> list[Tensor]:
    return [torch.cat([mine[name] for mine in given], 2) for name in "qkv"]


def _pieces(given: Given, *whole: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.chunk(len(given), 2) for x in whole)))


def _lse(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(2, 3) / HEAD_DIM**0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.logsumexp(scores.masked_fill(later, -torch.inf) if causal else scores, 3)


def _attention(given: Given) -> list[tuple[Tensor, ...]]:
    q, k, v = _joined(given)
    return _pieces(given, plain_attention(q, k, v, given[0]["causal"]))


def _forward(given: Given) -> list[tuple[Tensor, ...]]:
    (q, k, v), causal = _joined(given), given[0]["causal"]
    return _pieces(given, plain_attention(q, k, v, causal), _lse(q, k, causal))


def _backward(given: Given) -> list[tuple[Tensor, ...]]:
    q, k, v = (x.requires_grad_() for x in _joined(given))
    dout = torch.cat([mine["dout"] for mine in given], 2)
    out = plain_attention(q, k, v, given[0]["causal"])
    return _pieces(given, *torch.autograd.grad(out, (q, k, v), dout))


def _specification(
    name: str, signature: str, question: Question, formula: Callable[[int], float], says: str
) -> Specification:
    """formula(p): the bytes that a rank sends, in those of its queries."""
    stage = sends(question, lambda given, r: (formula(len(given)) * given[r]["q"].nbytes,), says)
    requirement = (
        f"Each rank has a piece of the sequence, and gets its part of the attention; it sends {says}."
    )
    return specification(name, signature, requirement, [question], [stage], (*KINDS, LATE))


ATTENTION = Question(_draw, _attention, ("the attention of its queries",), by_name=CAUSAL)

SPECIFICATIONS = [
    _specification(
        "ring_forward",
        f"ring_forward{SIGNATURE} -> (out, lse)",
        Question(
            _draw,
            _forward,
            ("the attention of its queries", "their log-sum-exp"),
            by_name=CAUSAL,
            differentiated=False,
        ),
        lambda p: 2 * (p - 1),
        "keys and values around a ring",
    ),
    _specification(
        "ring_backward",
        "ring_backward(comm, q, k, v, out, lse, dout, causal=True) -> (dq, dk, dv)",
        # A block that masks a key may or may not give it a nan.
        Question(
            _draw_backward,
            _backward,
            ("dq of its own tokens", "dk of its own tokens", "dv of its own tokens"),
            by_name=CAUSAL,
            differentiated=False,
            reached_by_nan=1,
        ),
        lambda p: 4 * (p - 1),
        "keys, values and their gradients around a ring",
    ),
    _specification(
        "ring_attention",
        f"ring_attention{SIGNATURE}",
        ATTENTION,
        lambda p: 6 * (p - 1),
        "keys, values and their gradients around a ring",
    ),
    _specification(
        "ulysses_attention",
        f"ulysses_attention{SIGNATURE}",
        ATTENTION,
        lambda p: 8 * (p - 1) / p,
        "an all-to-all of q, k, v and one of out, both ways",
    ),
]
