"""Specifications of the loss over all ranks' tokens, and of the norm of a gradient over all shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, on_ranks
from minipar.spec.varied import KINDS, PLAIN, RANKS, Kind
from minipar.spec.words import (
    RTOL,
    first,
    generator,
    grad_of,
    mismatch,
    normal,
    wrong_bytes,
    wrong_entries,
)

CERTAIN = Kind("with logits of thousands", scale=1e3)

V, D = 7, 4
Gradients = tuple[list[list[Tensor]], list[list[int]], Tensor]


def _batch(size: int, seed: int, kind: Kind = PLAIN) -> tuple[list[Tensor], list[Tensor]]:
    """Return each rank's logits and targets, of unequal lengths; from seed 2 on, no target counts on the last rank."""
    draw = generator(size, seed, kind.seed)
    least = 301 if kind.large else 3
    logits = [kind.rounded(kind.scale * normal(draw, least + 2 * r, V)) for r in range(size)]
    logits[0] = kind.with_nan(logits[0])
    targets = [torch.randint(V, (len(x),), generator=draw) for x in logits]
    for r, target in enumerate(targets):
        target[: r % 3] = -100
    if seed >= 2 and size > 1:
        targets[-1].fill_(-100)
    return logits, targets


def _varied_loss(world: Comm, global_loss: Implementation) -> str | None:
    return first(_loss(world, global_loss, 4, kind) for kind in (*KINDS, CERTAIN))


def _loss(world: Comm, global_loss: Implementation, seed: int, kind: Kind = PLAIN) -> str | None:
    p, r = world.size, world.rank
    logits, targets = _batch(p, seed, kind)
    mine = kind.given(logits[r], True)
    summand = global_loss(world, mine, kind.given(targets[r]))
    if not isinstance(summand, Tensor) or summand.shape or not summand.requires_grad:
        return f"rank {r}: it returned {_kind(summand)}; return this rank's summand, one element that autograd can follow"
    whole = torch.cat(logits).requires_grad_()
    want = F.cross_entropy(whole, torch.cat(targets))
    total = world.all_reduce(summand.detach())
    if words := kind.mismatch(f"rank {r}: the sum of the ranks' summands", total, want, p):
        return words + _means(total, logits, targets)
    (
        2.5 * summand
    ).backward()  # the loss need not be the last function, so its incoming gradient need not be 1
    if words := kind.written(f"rank {r}: its logits", mine, logits[r]):
        return words
    if kind.nan:
        return None
    (2.5 * want).backward()
    part = grad_of(whole).split([len(x) for x in logits])[r]
    return kind.mismatch(f"rank {r}: the gradient of its logits", mine.grad, part, p, whole=whole.grad)


def _kind(x: object) -> str:
    return f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _means(total: Tensor, logits: list[Tensor], targets: list[Tensor]) -> str:
    means = torch.stack([F.cross_entropy(x, t) for x, t in zip(logits, targets) if (t != -100).any()])
    for n in (1, len(logits)):
        if torch.isclose(total.double(), means.sum() / n, rtol=1e-9):
            return ": each rank divides by its own number of tokens; divide by that of all ranks"
    return ""


def _one_count(world: Comm, global_loss: Implementation) -> str | None:
    (logits, targets), p = _batch(world.size, 1), world.size
    world.traffic.reset()
    global_loss(world.using("tree"), logits[world.rank].requires_grad_(), targets[world.rank]).backward()
    if world.traffic.sent_bytes > 8 * p:
        return (
            f"rank {world.rank}: it sent {world.traffic.sent_bytes} bytes; the count is one number of 8 bytes"
        )
    return None


def _gradients(
    size: int, seed: int, dtype: torch.dtype, scale: float
) -> tuple[list[list[Tensor]], list[list[int]], Tensor]:
    """Return each rank's gradients (a shard, a replica, one held by two ranks), how many copies each has, and the norm."""
    draw = generator(size, seed)
    shapes = [(D,), (5, D), *((3 if r else 0, D) for r in range(size))]
    replica, tied, *shards = (scale * normal(draw, *shape).to(dtype) for shape in shapes)
    last = size - 1
    grads = [[shard, replica, *([tied] if r in (0, last) else [])] for r, shard in enumerate(shards)]
    copies = [[1, size, *([1 if size == 1 else 2] if r in (0, last) else [])] for r in range(size)]
    whole = torch.cat([x.double().flatten() for x in (*shards, replica, tied)])
    return grads, copies, whole.norm()


def _norm(
    world: Comm, grad_norm: Implementation, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> str | None:
    r = world.rank
    grads, copies, want = _gradients(world.size, seed, dtype, scale)
    got = grad_norm(world, grads[r], copies[r])
    if not isinstance(got, Tensor) or got.numel() != 1:
        return f"rank {r}: the norm is a {type(got).__name__}; return a tensor of one element"
    got = got.detach().double().reshape(())
    if words := mismatch(f"rank {r}: the norm", got, want, world.size, rtol=1e-6 if scale > 1 else RTOL):
        return words + _which_norm(got, grads, r)
    return None


def _varied_norm(world: Comm, grad_norm: Implementation) -> str | None:
    """Check gradients of every dtype, shape and stride together; finally, with a nan and an infinity."""
    p, r = world.size, world.rank
    for words, odd, call in (
        ("", None, 0),
        (" for the second time", None, 1),
        (", one of them nan", torch.nan, 2),
        (", one of them infinite", torch.inf, 3),
    ):
        draw = generator(p, 6, call)
        # Each rank has gradients of its own, of one element or of thousands, in three dtypes; the last rank has none.
        every = [
            [normal(draw), normal(draw, 1201), normal(draw, 40, 3).float(), normal(draw, 7, 9).bfloat16()]
            for _ in range(p - 1)
        ] + [[]]
        if odd is not None:
            every[0][2][5, 1] = odd
        mine = [torch.stack([g, 0 * g], -1)[..., 0] for g in every[r]]
        before = [g.clone() for g in mine]
        got = grad_norm(world, mine, [1] * len(mine))
        want = torch.cat([g.double().flatten() for grads in every for g in grads]).norm()
        if not isinstance(got, Tensor) or got.numel() != 1:
            return f"rank {r}: the norm is a {type(got).__name__}; return a tensor of one element"
        shapes = "shapes [], [1201], [40, 3] (float32), [7, 9] (bfloat16), not contiguous, and of a rank without gradients"
        what = f"rank {r}: the norm of gradients of {shapes}{words},"
        if wrong := mismatch(what, got.detach().double().reshape(()), want, p):
            return wrong
        if any(wrong_entries(now, was).any() for now, was in zip(mine, before)):
            return f"rank {r}: its gradients were written to; the norm is all that is asked for"
    return None


def _which_norm(got: Tensor, grads: list[list[Tensor]], rank: int) -> str:
    norms = [torch.cat([g.double().flatten() for g in mine]).norm() for mine in grads]
    every = torch.stack(norms)
    guesses = {
        "a parameter that several ranks hold was counted on each": every.norm(),
        "it is this rank's own, and has not met the others'": every[rank],
        "norms were added; add squares, and take the root at the end": every.sum(),
    }
    return "".join(f": {words}" for words, value in guesses.items() if torch.isclose(got, value, rtol=1e-9))


def _one_number(world: Comm, grad_norm: Implementation) -> str | None:
    grads, copies, _ = _gradients(world.size, 1, torch.float64, 1.0)
    world.traffic.reset()
    grad_norm(world.using("ring"), grads[world.rank], copies[world.rank])
    p, r = world.size, world.rank
    formula = 8 * (2 - (r == 0) - (r == p - 1))  # the number is rank 0's chunk; the other chunks are empty
    return wrong_bytes(world.traffic.sent_bytes, formula, r, p, "any gradients", "a ring of one number")


SPECIFICATIONS = [
    Specification(
        "global_loss",
        "global_loss(comm, logits, targets)",
        "The summands of all ranks add up to the mean cross-entropy over all counted tokens; -100 does not count.",
        (
            Stage("runs", lambda f: on_ranks(_loss, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_loss, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_loss, f, 2) or on_ranks(_loss, f, 3)),
            Stage("bytes", lambda f: on_ranks(_one_count, f, sizes=(2, 4))),
            Stage("varied", lambda f: on_ranks(_varied_loss, f, sizes=RANKS)),
        ),
    ),
    Specification(
        "grad_norm",
        "grad_norm(comm, grads, copies)",
        "The norm of the whole model's gradient: each element counts once, however many ranks hold it.",
        (
            Stage("runs", lambda f: on_ranks(_norm, f, 0, sizes=(1,))),
            Stage("small", lambda f: on_ranks(_norm, f, 1, sizes=(2,))),
            Stage("drawn", lambda f: on_ranks(_norm, f, 2) or on_ranks(_norm, f, 3, torch.float32, 1e25)),
            Stage("bytes", lambda f: on_ranks(_one_number, f, sizes=(3, 4))),
            Stage("varied", lambda f: on_ranks(_varied_norm, f, sizes=RANKS)),
        ),
    ),
]
