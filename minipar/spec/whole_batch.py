"""Specifications of the loss over all ranks' tokens, and of the norm of a gradient over all shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.spec.from_file import Implementation
from minipar.spec.question import VARIED_SEED, Asked, Given, Question, sends, specification
from minipar.spec.varied import KINDS, NAN, Kind, strided
from minipar.spec.words import generator, normal

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


def _mean_of_means(asked: Asked, got: Tensor) -> str:
    """Name the usual mistake, if it gives this sum."""
    parts = [(mine["logits"], mine["targets"]) for mine in asked.given if (mine["targets"] != -100).any()]
    means = torch.stack([F.cross_entropy(*part) for part in parts]).sum()
    if any(torch.isclose(got.double(), means / n, rtol=1e-9) for n in (1, asked.world.size)):
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


VARIED = Kind("in float64, float32 and bfloat16, not contiguous, and of a rank without gradients")
HUGE = Kind("of 1e25, in float32", rounding=1e-6)
INFINITE = Kind("with an infinity")
ODD = {NAN: torch.nan, INFINITE: torch.inf}


def _draw_gradients(size: int, seed: int, kind: Kind) -> Given:
    """Draw each rank's gradients: a shard, a replica and, on the first and the last rank, one that both of them hold.

    Varied ones are of every dtype, one element or thousands, and not contiguous; the last rank has none.
    """
    draw, last = generator(size, seed, kind.seed), size - 1
    if seed == VARIED_SEED and kind != HUGE:
        given: Given = []
        for rank in range(size):
            grads = [
                normal(draw),
                normal(draw, 1201),
                normal(draw, 40, 3).float(),
                normal(draw, 7, 9).bfloat16(),
            ]
            grads = [strided(g) for g in grads if rank < last or size == 1]
            given.append({"grads": grads, "copies": [1] * len(grads)})
        if kind in ODD:
            given[0]["grads"][2][5, 1] = ODD[kind]
        return given
    shapes = [(D,), (5, D), *((3 if r else 0, D) for r in range(size))]
    replica, tied, *shards = (normal(draw, *shape) for shape in shapes)
    given = [
        {"grads": [shard, replica, tied], "copies": [1, size, min(size, 2)]}
        if r in (0, last)
        else {"grads": [shard, replica], "copies": [1, size]}
        for r, shard in enumerate(shards)
    ]
    if kind == HUGE:
        for mine in given:
            mine["grads"] = [(1e25 * g).float() for g in mine["grads"]]
    return given


def _norm(given: Given) -> list[list[Tensor]]:
    squares = [g.double().square().sum() / n for mine in given for g, n in zip(mine["grads"], mine["copies"])]
    return [[torch.stack(squares).sum().sqrt()]] * len(given)


def _number(grad_norm: Implementation, *args: Any) -> Any:
    """Return the norm in float64, if it is one element of any dtype and shape."""
    got = grad_norm(*args)
    return got.double().reshape(()) if isinstance(got, Tensor) and got.numel() == 1 else got


def _which_norm(asked: Asked, got: Tensor) -> str:
    norms = [
        torch.stack([g.double().norm() for g in mine["grads"]]).norm()
        for mine in asked.given
        if mine["grads"]
    ]
    stacked = torch.stack(norms)
    guesses = {
        "a parameter that several ranks hold was counted on each": stacked.norm(),
        "it is this rank's own, and has not met the others'": stacked[min(asked.world.rank, len(norms) - 1)],
        "norms were added; add squares, and take the root at the end": stacked.sum(),
    }
    found = [words for words, norm in guesses.items() if torch.isclose(got, norm, rtol=1e-9, atol=0.0)]
    return f": {found[0]}" if found and len(norms) > 1 else ""


NORM = Question(
    _draw_gradients, _norm, ("the norm",), call=_number, differentiated=False, cause=_which_norm
)  # fmt: skip


def _one_number(given: Given, rank: int) -> tuple[float, ...]:
    """The number is rank 0's chunk; the other chunks are empty."""
    return (8 * (2 - (rank == 0) - (rank == len(given) - 1)),)


SPECIFICATIONS = [
    specification(
        "global_loss",
        "global_loss(comm, logits, targets)",
        "The summands of all ranks add up to the mean cross-entropy over all counted tokens; -100 does not count.",
        [LOSS],
        [
            sends(
                LOSS,
                lambda given, r: range(8 * len(given) + 1),
                "a count of 8 bytes, over a tree,",
                algorithm="tree",
            )
        ],
        (*KINDS, CERTAIN),
        ("mean of means",),
    ),
    specification(
        "grad_norm",
        "grad_norm(comm, grads, copies)",
        "The norm of the whole model's gradient: each element counts once, however many ranks hold it.",
        [NORM],
        [sends(NORM, _one_number, "a ring of one number", (3, 4))],
        (HUGE, VARIED, replace(VARIED, seed=1), NAN, INFINITE),
    ),
]
