"""Specification of differentiable communication: every backward is its forward's adjoint, and does not write to dy."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.varied import KINDS, PLAIN, RANKS, Kind
from minipar.spec.words import first, generator, normal

TOKENS = 1
OPERATORS = ("copy", "all_reduce", "gather_tokens", "scatter_tokens")


def _forward(name: str, xs: list[Tensor], rank: int) -> Tensor:
    match name:
        case "copy":
            return xs[rank]
        case "all_reduce":
            return torch.stack(xs).sum(0)
        case "gather_tokens":
            return torch.cat(xs, TOKENS)
    return torch.stack(xs).sum(0).chunk(len(xs), TOKENS)[rank]


ADJOINT = {
    "copy": "all_reduce",
    "all_reduce": "copy",
    "gather_tokens": "scatter_tokens",
    "scatter_tokens": "gather_tokens",
}


def _tensors(size: int, tokens: int, seed: int, kind: Kind = PLAIN) -> list[Tensor]:
    draw = generator(size, tokens, seed, kind.seed)
    xs = [kind.rounded(normal(draw, 2, tokens, 301 if kind.large else 3)) for _ in range(size)]
    return [kind.with_nan(xs[0]), *xs[1:]]


def _right(world: Comm, implementation: Implementation, seed: int) -> str | None:
    """Check the forward and the backward of each operator against one process."""
    return first([_right_operator(world, getattr(implementation, name), name, seed) for name in OPERATORS])


def _varied(world: Comm, implementation: Implementation) -> str | None:
    return first(
        _right_operator(world, getattr(implementation, name), name, 4, kind)
        for name in OPERATORS
        for kind in KINDS
    )


def _right_operator(
    world: Comm, operator: Implementation, name: str, seed: int, kind: Kind = PLAIN
) -> str | None:
    p, r = world.size, world.rank
    shard, whole = 2, 2 * p
    xs = _tensors(p, shard if name == "gather_tokens" else whole, seed, kind)
    dys = _tensors(p, shard if name == "scatter_tokens" else whole, seed + 1, kind)
    x, dy = kind.given(xs[r], True), kind.given(dys[r])
    y = operator(world, x)
    y.backward(dy)
    if words := kind.mismatch(f"rank {r}: {name}(x)", y, _forward(name, xs, r), p):
        return words
    if words := kind.mismatch(
        f"rank {r}: the gradient through {name}", x.grad, _forward(ADJOINT[name], dys, r), p
    ):
        return words + _reason(name, x.grad, dys, r)
    if kind.written("x", x, xs[r]):
        return f"rank {r}: {name} wrote to its input"
    if kind.written("dy", dy, dys[r]):
        return f"rank {r}: the backward of {name} wrote to the gradient it was given, which other operations read too"
    return None


def _reason(name: str, dx: Tensor | None, dys: list[Tensor], rank: int) -> str:
    """Explain a wrong gradient: parts of other ranks that are missing, or that were added to a complete one."""
    own = dys[rank].chunk(len(dys), TOKENS)[rank] if name == "gather_tokens" else dys[rank]
    if name == "all_reduce":
        summed = torch.stack(dys).sum(0)
        return (
            ": it is the sum of all ranks' dy, but each rank's dy is complete" if _equal(dx, summed) else ""
        )
    return ": it is this rank's dy alone; the other ranks' parts are missing" if _equal(dx, own) else ""


def _equal(got: Tensor | None, want: Tensor) -> bool:
    return got is not None and got.shape == want.shape and torch.allclose(got.double(), want.double())


def _adjoint(world: Comm, implementation: Implementation, seed: int) -> str | None:
    """Check <z, A x> = <A^T z, x>, summed over ranks, for each operator."""
    p, r = world.size, world.rank
    for name in OPERATORS:
        # The input of `copy` and the output of `all_reduce` are equal on all ranks: count such a tensor once, not p times.
        one_x, one_y = name == "copy", name == "all_reduce"
        x = _tensors(p, 2 if name == "gather_tokens" else 2 * p, seed)[0 if one_x else r].requires_grad_()
        out = getattr(implementation, name)(world, x)
        z = _tensors(p, out.shape[TOKENS], seed + 2)[0 if one_y else r]
        (dx,) = torch.autograd.grad(out, x, z)
        left = (z * out.detach()).sum() * (r == 0 or not one_y)
        right = (dx * x.detach()).sum() * (r == 0 or not one_x)
        sums = world.all_reduce(torch.stack([left, right]))
        if (sums[0] - sums[1]).abs() > 1e-10 * sums.abs().max():
            return f"rank {r}: {name} and its backward are no adjoints: <z, A x> is {sums[0]:.6g}, <A^T z, x> {sums[1]:.6g}"
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
            Stage("varied", lambda f: on_ranks(_varied, f, sizes=RANKS)),
        ),
    )
]
