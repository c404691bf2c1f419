"""Specifications of the loss over all ranks' tokens, and of the norm of a gradient over all shards."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.counted import counted
from minipar.spec.from_file import Implementation
from minipar.spec.question import Given, Question, sends, specification
from minipar.spec.specification import Specification, Stage, every
from minipar.spec.varied import KINDS, Kind
from minipar.spec.words import RTOL, generator, mismatch, normal, wrong_bytes

CERTAIN = Kind("with logits of thousands", scale=1e3)

V, D = 7, 4


def _draw(size: int, seed: int, kind: Kind) -> Given:
    """Draw logits and targets of unequal lengths; the last rank has none that counts, or none at all.

    Large batches have 70,001 targets, a number for which half precision is too small.
    """
    draw = generator(size, seed, kind.seed)
    lengths = [3 + 2 * r for r in range(size)]
    if kind.large:
        lengths[0] = 70_001
    if seed == 4 and size > 1:
        lengths[-1] = 0
    logits = [kind.rounded(kind.scale * normal(draw, n, V)) for n in lengths]
    logits[0] = kind.with_nan(logits[0])
    targets = [torch.randint(V, (n,), generator=draw) for n in lengths]
    for r, target in enumerate(targets):
        target[: r % 3] = -100
    if seed >= 2 and size > 1:
        targets[-1].fill_(-100)
    return [{"logits": x, "targets": t} for x, t in zip(logits, targets)]


def _answer(given: Given) -> list[list[Tensor]]:
    logits, targets = (torch.cat([mine[name] for mine in given]) for name in ("logits", "targets"))
    return [[F.cross_entropy(logits, targets)]] * len(given)


def _mean_of_means(world: Comm, got: Tensor, given: Given) -> str:
    """Name the usual mistake, if it gives this sum."""
    parts = [(mine["logits"], mine["targets"]) for mine in given if (mine["targets"] != -100).any()]
    means = torch.stack([F.cross_entropy(*part) for part in parts]).sum()
    if any(torch.isclose(got.double(), means / n, rtol=1e-9) for n in (1, world.size)):
        return ": each rank divides by its own number of tokens; divide by that of all ranks"
    return ""


def _draw_some(size: int, seed: int, kind: Kind) -> Given:
    """Draw as `_draw` does, but for each rank a target that counts, since it has a mean."""
    given = _draw(size, min(seed, 3), kind)
    for mine in given:
        mine["targets"][-1] = 0
    return given


def _means(given: Given) -> list[list[Tensor]]:
    means = [F.cross_entropy(mine["logits"], mine["targets"]) for mine in given]
    return [[torch.stack(means).mean()]] * len(given)


SUMMANDS = ("the ranks' summands",)
LOSS = Question(
    _draw,
    _answer,
    SUMMANDS,
    summands=SUMMANDS,
    cause=_mean_of_means,
    by_convention={"mean of means": Question(_draw_some, _means, SUMMANDS, summands=SUMMANDS)},
)


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
        grads_of = [
            [normal(draw), normal(draw, 1201), normal(draw, 40, 3).float(), normal(draw, 7, 9).bfloat16()]
            for _ in range(max(1, p - 1))
        ] + [[]] * (p > 1)
        if odd is not None:
            grads_of[0][2][5, 1] = odd
        mine = [torch.stack([g, 0 * g], -1)[..., 0] for g in grads_of[r]]
        got = grad_norm(world, mine, [1] * len(mine))
        want = torch.cat([g.double().flatten() for grads in grads_of for g in grads]).norm()
        if not isinstance(got, Tensor) or got.numel() != 1:
            return f"rank {r}: the norm is a {type(got).__name__}; return a tensor of one element"
        shapes = "shapes [], [1201], [40, 3] (float32), [7, 9] (bfloat16), not contiguous, and of a rank without gradients"
        what = f"rank {r}: the norm of gradients of {shapes}{words},"
        if wrong := mismatch(what, got.detach().double().reshape(()), want, p):
            return wrong
    return None


def _which_norm(got: Tensor, grads: list[list[Tensor]], rank: int) -> str:
    norms = [torch.cat([g.double().flatten() for g in mine]).norm() for mine in grads]
    stacked = torch.stack(norms)
    guesses = {
        "a parameter that several ranks hold was counted on each": stacked.norm(),
        "it is this rank's own, and has not met the others'": stacked[rank],
        "norms were added; add squares, and take the root at the end": stacked.sum(),
    }
    return "".join(f": {words}" for words, value in guesses.items() if torch.isclose(got, value, rtol=1e-9))


def _one_number(world: Comm, grad_norm: Implementation) -> str | None:
    grads, copies, _ = _gradients(world.size, 1, torch.float64, 1.0)
    with counted(world) as sent:
        grad_norm(world.using("ring"), grads[world.rank], copies[world.rank])
    p, r = world.size, world.rank
    formula = 8 * (2 - (r == 0) - (r == p - 1))  # the number is rank 0's chunk; the other chunks are empty
    return wrong_bytes(sent, formula, r, p, "any gradients", "a ring of one number")


SPECIFICATIONS = [
    specification(
        "global_loss",
        "global_loss(comm, logits, targets)",
        "The summands of all ranks add up to the mean cross-entropy over all counted tokens; -100 does not count.",
        [LOSS],
        [
            Stage(
                "bytes",
                partial(
                    sends,
                    question=LOSS,
                    formula=lambda given, r: range(8 * len(given) + 1),
                    says="a count of 8 bytes, over a tree,",
                    algorithm="tree",
                ),
                (2, 4),
            )
        ],
        (*KINDS, CERTAIN),
        ("mean of means",),
    ),
    Specification(
        "grad_norm",
        "grad_norm(comm, grads, copies)",
        "The norm of the whole model's gradient: each element counts once, however many ranks hold it.",
        (
            Stage("runs", partial(_norm, seed=0), (1,)),
            Stage("small", partial(_norm, seed=1), (2,)),
            Stage(
                "drawn",
                every(partial(_norm, seed=2), partial(_norm, seed=3, dtype=torch.float32, scale=1e25)),
            ),
            Stage("bytes", _one_number, (3, 4)),
            Stage("varied", _varied_norm, (2, 5, 7)),
        ),
    ),
]
