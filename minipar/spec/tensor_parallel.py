"""Specifications of layers computed by tp ranks together: the output, every gradient, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.model.norm import rms_norm
from minipar.spec.question import Given, Question, sends, specification
from minipar.spec.specification import Specification
from minipar.spec.varied import KINDS, Kind
from minipar.spec.words import generator, normal

HEAD_DIM = 4
MLP, ATTENTION = ("gate", "up", "down"), ("q", "k", "v", "o")


def one_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def one_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    B, T, D = x.shape
    q, k, v = ((x @ w.t()).view(B, T, -1, HEAD_DIM).transpose(1, 2) for w in (q, k, v))
    return plain_attention(q, k, v).transpose(1, 2).reshape(B, T, D) @ o.t()


def one_block(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + one_mlp(rms_norm(x, norm, 1e-5), gate, up, down)


def _draw(names: Sequence[str], own_tokens: bool, size: int, seed: int, kind: Kind) -> Given:
    """Draw x [B, T, D], whole or this rank's tokens, a norm's weight for these, and each rank's part of the matrices."""
    draw = generator(size, seed, kind.seed)
    unit = 12 if 12 % size == 0 else 2 * size
    D, hidden, T = unit * HEAD_DIM, unit * (1 + seed % 3), 4 * unit if kind.large else unit
    x = kind.with_nan(kind.rounded(normal(draw, 2, T, D)))
    norm = kind.rounded(1 + 0.1 * normal(draw, D))
    given: Given = (
        [{"x": part.clone()} for part in x.chunk(size, 1)] if own_tokens else [{"x": x} for _ in range(size)]
    )
    for name in names:
        rows, columns = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "down": (D, hidden)}.get(
            name, (hidden, D)
        )
        w = kind.rounded(normal(draw, rows, columns) / columns**0.5) * (kind.scale if name == "q" else 1)
        for mine, part in zip(given, w.chunk(size, 1 if name == names[-1] else 0)):
            mine.update({"norm": norm} if own_tokens and "norm" not in mine else {})
            mine[name] = part.clone()
    return given


def _answer(
    one: Callable[..., Tensor], names: Sequence[str], own_tokens: bool, given: Given
) -> list[list[Tensor]]:
    whole = [torch.cat([mine[name] for mine in given], 1 if name == names[-1] else 0) for name in names]
    if not own_tokens:
        return [[one(given[0]["x"], *whole)]] * len(given)
    y = one(torch.cat([mine["x"] for mine in given], 1), given[0]["norm"], *whole)
    return [[part] for part in y.chunk(len(given), 1)]


def _specification(
    name: str,
    signature: str,
    one: Callable[..., Tensor],
    names: Sequence[str],
    formula: Callable[[Given, int], tuple[float, ...]],
    says: str,
    kinds: Sequence[Kind] = KINDS,
) -> Specification:
    own_tokens = one is one_block
    question = Question(
        partial(_draw, names, own_tokens),
        partial(_answer, one, names, own_tokens),
        ("the output, its own tokens," if own_tokens else "the output",),
    )
    each = (
        "y = x + mlp(norm(x)), each rank with its own tokens of x and y"
        if own_tokens
        else "y and dx are one process's"
    )
    requirement = (
        f"{each}; each rank's part of a matrix gets its part of the gradient, and what is whole a whole one."
    )
    stage = sends(question, formula, says)
    return specification(name, signature, requirement, [question], [stage], kinds, ("partial gradients",))


def _two_sums(given: Given, rank: int) -> tuple[float, ...]:
    p = len(given)
    return (4 * (p - 1) / p * given[rank]["x"].nbytes,)


def _halves(given: Given, rank: int) -> tuple[float, ...]:
    p = len(given)
    half, norm = (p - 1) * given[rank]["x"].nbytes, 2 * (p - 1) / p * given[rank]["norm"].nbytes
    return 4 * half + norm, 5 * half + norm


HUNDREDS = Kind(
    "with scores of hundreds", scale=200.0, backward=False
)  # weights of 0 and 1 have no gradients
SPECIFICATIONS = [
    _specification(
        "mlp", "mlp(comm, x, gate, up, down)", one_mlp, MLP, _two_sums, "one sum forward and one backward"
    ),
    _specification(
        "attention",
        "attention(comm, x, q, k, v, o), heads of 4 features",
        one_attention,
        ATTENTION,
        _two_sums,
        "one sum forward and one backward",
        (*KINDS, HUNDREDS),
    ),
    _specification(
        "sequence_parallel",
        "block(comm, x, norm, gate, up, down)",
        one_block,
        MLP,
        _halves,
        "a gather and a scatter, forward and backward, the norm's gradient and perhaps another gather in the backward",
    ),
]
