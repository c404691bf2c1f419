"""Specification of communication that autograd differentiates: every backward is the adjoint; no gradient is written to."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, first, generator

TOKENS = 1
OPERATORS = ("copy", "all_reduce", "gather_tokens", "scatter_tokens")


def _forward(name: str, xs: list[Tensor], rank: int) -> Tensor:
    match name:
        case "copy":
            return xs[rank]
        case "all_reduce":
            return sum(xs)
        case "gather_tokens":
            return torch.cat(xs, TOKENS)
    return sum(xs).chunk(len(xs), TOKENS)[rank]


ADJOINT = {
    "copy": "all_reduce",
    "all_reduce": "copy",
    "gather_tokens": "scatter_tokens",
    "scatter_tokens": "gather_tokens",
}


def _tensors(size: int, tokens: int, seed: int) -> list[Tensor]:
    draw = generator(size, tokens, seed)
    return [torch.randn(2, tokens, 3, generator=draw, dtype=torch.float64) for _ in range(size)]


def _right(world, implementation, seed: int) -> str | None:
    """Check the forward and the backward of each operator against one process."""
    return first([_right_operator(world, getattr(implementation, name), name, seed) for name in OPERATORS])


def _right_operator(world, operator, name: str, seed: int) -> str | None:
    p, r = world.size, world.rank
    shard, whole = 2, 2 * p
    xs = _tensors(p, shard if name == "gather_tokens" else whole, seed)
    dys = _tensors(p, shard if name == "scatter_tokens" else whole, seed + 1)
    x, dy = xs[r].clone().requires_grad_(), dys[r].clone()
    y = operator(world, x)
    y.backward(dy)
    if words := differs(f"rank {r}: {name}(x)", y, _forward(name, xs, r), p):
        return words
    if words := differs(f"rank {r}: the gradient through {name}", x.grad, _forward(ADJOINT[name], dys, r), p):
        return words
    if not torch.equal(x.detach(), xs[r]):
        return f"rank {r}: {name} wrote to its input"
    if not torch.equal(dy, dys[r]):
        return f"rank {r}: the backward of {name} wrote to the gradient it was given, which other operations read too"
    return None


def _adjoint(world, implementation, seed: int) -> str | None:
    """Check <y, A x> = <A^T y, x>, summed over ranks, for each operator."""
    p, r = world.size, world.rank
    for name in OPERATORS:
        # The input of `copy` and the output of `all_reduce` are one tensor, equal on all ranks: it counts once.
        one_x, one_y = name == "copy", name == "all_reduce"
        x = _tensors(p, 2 if name == "gather_tokens" else 2 * p, seed)[0 if one_x else r].requires_grad_()
        out = getattr(implementation, name)(world, x)
        y = _tensors(p, out.shape[TOKENS], seed + 2)[0 if one_y else r]
        (dx,) = torch.autograd.grad(out, x, y)
        left = (y * out.detach()).sum() * (r == 0 or not one_y)
        right = (dx * x.detach()).sum() * (r == 0 or not one_x)
        sums = world.all_reduce(torch.stack([left, right]))
        if (sums[0] - sums[1]).abs() > 1e-10 * sums.abs().max():
            return f"rank {r}: {name} and its backward are no adjoints: <y, A x> is {sums[0]:.6g}, <A^T y, x> {sums[1]:.6g}"
    return None


SPECIFICATIONS = [
    Specification(
        "conjugates",
        "copy(comm, x), all_reduce(comm, x), gather_tokens(comm, x), scatter_tokens(comm, x)",
        "The backward of each operator is its adjoint; no input and no gradient is written to.",
        (
            Stage("runs", lambda f: on_ranks(_right, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_right, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_right, f, 2) or on_ranks(_adjoint, f, 3)),
        ),
    )
]
