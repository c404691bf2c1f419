"""Specifications of layers computed by tp ranks together: the output, every gradient, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.model.attention import plain_attention
from minipar.model.norm import rms_norm
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Body, Specification, Stage, on_ranks
from minipar.spec.varied import KINDS, PLAIN, RANKS, Kind
from minipar.spec.words import first, generator, grad_of, normal, wrong_bytes

Layer = Callable[..., Tensor]

SIZES = (1, 2, 3, 4)
HEAD_DIM = 4


class Case:
    """A random input x and gradient dy [B, T, D], and random unsharded matrices."""

    def __init__(self, size: int, seed: int, kind: Kind = PLAIN):
        draw = generator(size, seed, kind.seed)
        unit = 12 if 12 % size == 0 else 2 * size
        self.size, self.kind, self.D, self.F = size, kind, unit * HEAD_DIM, unit * (1 + seed % 3)
        T = 4 * unit if kind.large else unit
        self.x = kind.with_nan(kind.rounded(normal(draw, 2, T, self.D)))
        self.dy = kind.rounded(normal(draw, 2, T, self.D))
        self.norm = kind.rounded(1 + 0.1 * normal(draw, self.D))
        up, down, square = (self.F, self.D), (self.D, self.F), (self.D, self.D)
        self.mlp = [kind.rounded(normal(draw, *shape) / shape[-1] ** 0.5) for shape in (up, up, down)]
        self.attention = [kind.rounded(normal(draw, *shape) / shape[-1] ** 0.5) for shape in [square] * 4]
        self.attention[0] *= kind.scale

    def cut(self, whole: list[Tensor], rank: int) -> list[Tensor]:
        """Return this rank's shards as leaf tensors: columns of the last matrix, rows of the other matrices."""
        dims = [0] * (len(whole) - 1) + [1]
        return [self.kind.given(w.chunk(self.size, dim)[rank], True) for w, dim in zip(whole, dims)]

    def parts(self, whole: list[Tensor], rank: int) -> list[Tensor]:
        """Return the gradients of this rank's shards, from those of the whole matrices."""
        dims = [0] * (len(whole) - 1) + [1]
        return [grad_of(w).chunk(self.size, dim)[rank] for w, dim in zip(whole, dims)]


def one_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def one_attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    B, T, D = x.shape
    q, k, v = ((x @ w.t()).view(B, T, -1, HEAD_DIM).transpose(1, 2) for w in (q, k, v))
    return plain_attention(q, k, v).transpose(1, 2).reshape(B, T, D) @ o.t()


def _layer(
    world: Comm, layer: Implementation, one: Layer, names: list[str], seed: int, kind: Kind = PLAIN
) -> str | None:
    """Check a layer whose x, y and dx are the same on every rank."""
    case, r = Case(world.size, seed, kind), world.rank
    whole = case.mlp if one is one_mlp else case.attention
    mine = case.cut(whole, r)
    x = kind.given(case.x, True)
    y = layer(world, x, *mine)
    wanted_x, wanted = case.x.clone().requires_grad_(), [w.clone().requires_grad_() for w in whole]
    want = one(wanted_x, *wanted)
    if words := kind.mismatch(f"rank {r}: the output", y, want, world.size):
        return words
    y.backward(kind.given(case.dy))
    if words := kind.written(f"rank {r}: x", x, case.x):
        return words
    # Which gradients a nan reaches depends on the order of sums; attention weights of 0 and 1 have no gradients.
    if kind.nan or kind.scale > 1:
        return None
    want.backward(case.dy)
    for name, part, grad in zip(names, mine, case.parts(wanted, r)):
        if words := kind.mismatch(
            f"rank {r}: the gradient of its part of {name}", part.grad, grad, world.size
        ):
            return words
    return kind.mismatch(f"rank {r}: the gradient of x", x.grad, wanted_x.grad, world.size)


def _varied(world: Comm, layer: Implementation, body: Body, kinds: Iterable[Kind]) -> str | None:
    return first(body(world, layer, seed=4, kind=kind) for kind in kinds)


def _sums(world: Comm, layer: Implementation, one: Layer, formula: Callable[[int], float]) -> str | None:
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


def _layer_specification(
    name: str, signature: str, one: Layer, names: list[str], kinds: tuple[Kind, ...] = KINDS
) -> Specification:
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
        Stage("varied", lambda f: on_ranks(_varied, f, body, kinds, sizes=RANKS)),
    )
    says = "y and dx are one process's on every rank; each rank's part of a matrix gets its part of the gradient."
    return Specification(name, signature, says, stages)


def _block(world: Comm, block: Implementation, seed: int, kind: Kind = PLAIN) -> str | None:
    """Check a sequence-parallel block: x and y hold this rank's tokens; the norm's weight is not sharded."""
    case, p, r = Case(world.size, seed, kind), world.size, world.rank
    mine, norm = case.cut(case.mlp, r), kind.given(case.norm, True)
    x = kind.given(case.x.chunk(p, 1)[r], True)
    y = block(world, x, norm, *mine)
    wanted_x, wanted_norm = case.x.clone().requires_grad_(), case.norm.clone().requires_grad_()
    wanted = [w.clone().requires_grad_() for w in case.mlp]
    want = wanted_x + one_mlp(rms_norm(wanted_x, wanted_norm, 1e-5), *wanted)
    if words := kind.mismatch(f"rank {r}: the output, its own tokens", y, want.chunk(p, 1)[r], p):
        return words
    y.backward(kind.given(case.dy.chunk(p, 1)[r]))
    if words := kind.written(f"rank {r}: x", x, case.x.chunk(p, 1)[r]):
        return words
    if kind.nan:
        return None
    want.backward(case.dy)
    for name, part, grad in zip(("gate", "up", "down"), mine, case.parts(wanted, r)):
        if words := kind.mismatch(f"rank {r}: the gradient of its part of {name}", part.grad, grad, p):
            return words
    if words := kind.mismatch(f"rank {r}: the gradient of the norm's weight", norm.grad, wanted_norm.grad, p):
        return words + ": a rank's own tokens give a part of it"
    return kind.mismatch(
        f"rank {r}: the gradient of x, its own tokens", x.grad, grad_of(wanted_x).chunk(p, 1)[r], p
    )


def _block_bytes(world: Comm, block: Implementation) -> str | None:
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
        (*KINDS, Kind("with scores of hundreds", scale=200.0)),
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
            Stage("varied", lambda f: on_ranks(_varied, f, _block, KINDS, sizes=RANKS)),
        ),
    ),
]
