"""Specifications of the embedding and the cross-entropy with a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.comm import Comm
from minipar.spec.from_file import Implementation
from minipar.spec.question import Given, Question, sends, specification
from minipar.spec.specification import Stage
from minipar.spec.varied import KINDS, Kind
from minipar.spec.words import generator, normal
from minipar.support.live_bytes import LiveBytes

APART = Kind("with logits of some tokens 10,000 above those of others")
IMPOSSIBLE = Kind("with logits of -inf that are no targets")
# The probability of a target is nearly 1: computed in bfloat16, with 8 bits, the loss and its gradient would have no
# correct digit. What is returned may be rounded to bfloat16: twice.
CERTAIN = Kind(
    "in bfloat16 with targets far above the rest, where float32 is owed inside",
    torch.bfloat16,
    seed=2,
    rounding=2**-7,
)


def _draw_rows(size: int, seed: int, kind: Kind) -> Given:
    draw = generator(size, seed, kind.seed)
    V, D, T = (200 * size, 8, 301) if kind.large else (5 * size, 3, 7)
    whole = kind.with_nan(kind.rounded(normal(draw, V, D)))
    tokens = torch.randint(V, (2, T), generator=draw)
    tokens[0, :2] = torch.tensor([0, V - 1])
    return [{"tokens": tokens, "w": part.clone()} for part in whole.chunk(size)]


def _rows(given: Given) -> list[list[Tensor]]:
    return [[F.embedding(given[0]["tokens"], torch.cat([mine["w"] for mine in given]))]] * len(given)


def _draw_logits(size: int, seed: int, kind: Kind) -> Given:
    draw = generator(size, seed, kind.seed)
    V, N = (100 * size, 41) if kind.large else (4 * size, 12 * size)
    scale = {2: 3.0, 3: 1e4}.get(seed, 1.0 if seed < 2 else 3.0)
    whole = kind.with_nan(kind.rounded(scale * normal(draw, N, V)))
    targets = torch.randint(V, (N,), generator=draw)
    if kind == APART:
        whole += torch.arange(N)[:, None] * 1e4
    if kind == IMPOSSIBLE:
        whole[torch.arange(N), (targets + 1) % V] = -torch.inf
    if kind == CERTAIN:
        whole[torch.arange(N), targets] = whole.amax(1) + 6
        whole = kind.rounded(whole)
    return [{"logits": part.clone(), "targets": targets} for part in whole.chunk(size, 1)]


def _loss(given: Given) -> list[list[Tensor]]:
    return [[F.cross_entropy(torch.cat([mine["logits"] for mine in given], 1), given[0]["targets"])]] * len(
        given
    )


EMBEDDING = Question(_draw_rows, _rows, ("the rows looked up",))
LOSS = Question(_draw_logits, _loss, ("the loss of logits",))


def _no_whole_table(world: Comm, embedding: Implementation) -> str | None:
    """Check that fewer bytes are allocated than the whole table has, beside those of tokens and rows."""
    rows = torch.ones(4096, 64, requires_grad=True)
    tokens = torch.arange(world.size)[None] * 4096
    with LiveBytes() as live:
        embedding(world, tokens, rows)
    if live.peak > rows.nbytes // 2:
        return f"{live.peak} bytes are allocated for {world.size} rows; the table is too large to move"
    return None


def _three_numbers(given: Given, rank: int) -> tuple[float, ...]:
    p, N = len(given), len(given[rank]["targets"])
    return (2 * (p - 1) / p * 3 * N * 8,)


SPECIFICATIONS = [
    specification(
        "vocab_embedding",
        "embedding(comm, tokens, w)",
        "Rank r has rows r V/tp ...; every rank gets every token's row, and no rank the whole table.",
        [EMBEDDING],
        [Stage("memory", _no_whole_table, (2, 4))],
    ),
    specification(
        "vocab_loss",
        "cross_entropy(comm, logits, targets)",
        "The mean cross-entropy, from logits [N, V/tp] that never meet; three numbers per target travel, "
        "in float32 or wider.",
        [LOSS],
        [sends(LOSS, _three_numbers, "three numbers per target")],
        (*KINDS, APART, IMPOSSIBLE, CERTAIN),
    ),
]
