"""Specifications of layers computed by tp ranks together: the output, every gradient, and the bytes sent."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.model.norm import rms_norm
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.words import differs, generator, wrong_bytes

SIZES = (1, 2, 3, 4)
HEAD_DIM = 4


class Case:
    """A random input x and gradient dy [B, T, D], and random whole matrices; `cut` gives a rank's parts, as leaves."""

    def __init__(self, size: int, seed: int, T: int = 12):
        draw = generator(size, seed)
        self.size, self.D, self.F = size, 12 * HEAD_DIM, 12 * (1 + seed % 3)
        self.x = torch.randn(2, T, self.D, generator=draw, dtype=torch.float64)
        self.dy = torch.randn(2, T, self.D, generator=draw, dtype=torch.float64)
        matrix = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5  # noqa: E731
        self.norm = 1 + 0.1 * torch.randn(self.D, generator=draw, dtype=torch.float64)
        self.mlp = [matrix(self.F, self.D), matrix(self.F, self.D), matrix(self.D, self.F)]
        self.attention = [matrix(self.D, self.D) for _ in range(4)]

    def cut(self, whole: list[Tensor], rank: int) -> list[Tensor]:
        """Shard the matrices: the last by columns, the others by rows."""
        dims = [0] * (len(whole) - 1) + [1]
        return [w.chunk(self.size, dim)[rank].clone().requires_grad_() for w, dim in zip(whole, dims)]


def one_mlp(x, gate, up, down) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def one_attention(x, q, k, v, o) -> Tensor:
    B, T, D = x.shape
    q, k, v = ((x @ w.t()).view(B, T, -1, HEAD_DIM).transpose(1, 2) for w in (q, k, v))
    return plain_attention(q, k, v).transpose(1, 2).reshape(B, T, D) @ o.t()


def _layer(world, layer, one, names: list[str], seed: int) -> str | None:
    """Check a layer on all tokens: x, y and dx are the same on every rank."""
    case, r = Case(world.size, seed), world.rank
    whole = case.mlp if one is one_mlp else case.attention
    mine = case.cut(whole, r)
    x = case.x.clone().requires_grad_()
    y = layer(world, x, *mine)
    wanted_x, wanted = case.x.clone().requires_grad_(), [w.clone().requires_grad_() for w in whole]
    want = one(wanted_x, *wanted)
    if words := differs(f"rank {r}: the output", y, want, world.size):
        return words
    y.backward(case.dy)
    want.backward(case.dy)
    grads = [w.grad for w in wanted]
    for name, part, grad in zip(names, mine, case.cut(grads, r)):
        if words := differs(
            f"rank {r}: the gradient of its part of {name}", part.grad, grad.detach(), world.size
        ):
            return words
    return differs(f"rank {r}: the gradient of x", x.grad, wanted_x.grad, world.size)


def _sums(world, layer, one, formula) -> str | None:
    case, p = Case(world.size, 0), world.size
    mine = case.cut(case.mlp if one is one_mlp else case.attention, world.rank)
    x = case.x.clone().requires_grad_()
    world.traffic.reset()
    layer(world.using("ring"), x, *mine).backward(case.dy)
    of = f"x of {case.x.numel()} elements"
    bytes_ = formula(p) * case.x.nbytes
    return wrong_bytes(
        world.traffic.sent_bytes, bytes_, world.rank, p, of, "one sum forward and one backward"
    )


def _layer_specification(name: str, signature: str, one, names: list[str]) -> Specification:
    body = partial(_layer, one=one, names=names)
    stages = (
        Stage("runs", lambda f: on_ranks(partial(body, seed=0), f, sizes=(1,))),
        Stage("small", lambda f: on_ranks(partial(body, seed=1), f, sizes=(2,))),
        Stage(
            "drawn",
            lambda f: on_ranks(partial(body, seed=2), f) or on_ranks(partial(body, seed=3), f, sizes=(3, 4)),
        ),
        Stage(
            "bytes",
            lambda f: on_ranks(partial(_sums, one=one, formula=lambda p: 4 * (p - 1) / p), f, sizes=(2, 4)),
        ),
    )
    says = "y and dx are one process's on every rank; each rank's part of a matrix gets its part of the gradient."
    return Specification(name, signature, says, stages)


def _block(world, block, seed: int) -> str | None:
    """Check a sequence-parallel block: x and y are this rank's tokens; the norm's weight and its gradient are whole."""
    case, p, r = Case(world.size, seed), world.size, world.rank
    mine, norm = case.cut(case.mlp, r), case.norm.clone().requires_grad_()
    x = case.x.chunk(p, 1)[r].clone().requires_grad_()
    y = block(world, x, norm, *mine)
    wanted_x, wanted_norm = case.x.clone().requires_grad_(), case.norm.clone().requires_grad_()
    wanted = [w.clone().requires_grad_() for w in case.mlp]
    want = wanted_x + one_mlp(rms_norm(wanted_x, wanted_norm, 1e-5), *wanted)
    if words := differs(f"rank {r}: the output, its own tokens", y, want.chunk(p, 1)[r], p):
        return words
    y.backward(case.dy.chunk(p, 1)[r])
    want.backward(case.dy)
    for name, part, grad in zip(("gate", "up", "down"), mine, case.cut([w.grad for w in wanted], r)):
        if words := differs(f"rank {r}: the gradient of its part of {name}", part.grad, grad.detach(), p):
            return words
    if words := differs(f"rank {r}: the gradient of the norm's weight", norm.grad, wanted_norm.grad, p):
        return words + ": a rank's own tokens give a part of it"
    return differs(f"rank {r}: the gradient of x, its own tokens", x.grad, wanted_x.grad.chunk(p, 1)[r], p)


def _block_bytes(world, block) -> str | None:
    case, p = Case(world.size, 0), world.size
    mine, norm = case.cut(case.mlp, world.rank), case.norm.clone().requires_grad_()
    x = case.x.chunk(p, 1)[world.rank].clone().requires_grad_()
    world.traffic.reset()
    block(world.using("ring"), x, norm, *mine).backward(case.dy.chunk(p, 1)[world.rank])
    sent, halves, norms = world.traffic.sent_bytes, (p - 1) / p * case.x.nbytes, 2 * (p - 1) / p * norm.nbytes
    if sent in (4 * halves + norms, 5 * halves + norms):
        return None
    formula = f"{4 * halves + norms:g} ({5 * halves + norms:g} if the backward gathers its input again)"
    return (
        f"rank {world.rank}: {p} ranks, x of {case.x.numel()} elements: it sent {sent} bytes; a gather and a scatter, "
        f"forward and backward, and the norm's gradient send {formula}"
    )


SPECIFICATIONS = [
    _layer_specification("mlp", "mlp(comm, x, gate, up, down)", one_mlp, ["gate", "up", "down"]),
    _layer_specification(
        "attention",
        "attention(comm, x, q, k, v, o), heads of 4 features",
        one_attention,
        ["q", "k", "v", "o"],
    ),
    Specification(
        "sequence_parallel",
        "block(comm, x, norm, gate, up, down)",
        "y = x + mlp(norm(x)), each rank with its own tokens of x and y.",
        (
            Stage("runs", lambda f: on_ranks(_block, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_block, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_block, f, 2)),
            Stage("bytes", lambda f: on_ranks(_block_bytes, f, sizes=(2, 4))),
        ),
    ),
]
