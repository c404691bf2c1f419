"""Specification of differentiable communication: every backward is its forward's adjoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minipar.spec.question import Given, Question, specification
from minipar.spec.varied import Kind
from minipar.spec.words import generator, normal

TOKENS = 1


def _draw(name: str, size: int, seed: int, kind: Kind) -> Given:
    draw = generator(size, seed, kind.seed)
    tokens = 2 if name == "gather_tokens" else 2 * size
    xs = [kind.rounded(normal(draw, 2, tokens, 301 if kind.large else 3)) for _ in range(size)]
    xs[0] = kind.with_nan(xs[0])
    return [{"x": x} for x in (xs[:1] * size if name == "copy" else xs)]


def _added(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


OPERATORS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "copy": lambda xs: [x.clone() for x in xs],
    "all_reduce": lambda xs: [_added(xs)] * len(xs),
    "gather_tokens": lambda xs: [torch.cat(xs, TOKENS) for _ in xs],
    "scatter_tokens": lambda xs: list(_added(xs).chunk(len(xs), TOKENS)),
}


def _question(name: str) -> Question:
    def answer(given: Given) -> list[list[Tensor]]:
        return [[y] for y in OPERATORS[name]([mine["x"] for mine in given])]

    return Question(partial(_draw, name), answer, (f"{name}(x)",), attribute=name, linear=True)


SPECIFICATIONS = [
    specification(
        "conjugates",
        "copy(comm, x), all_reduce(comm, x), gather_tokens(comm, x), scatter_tokens(comm, x)",
        "The backward of each operator is its adjoint; no input and no gradient is written to.",
        [_question(name) for name in OPERATORS],
    )
]
