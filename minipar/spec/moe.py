"""Specifications of dispatch, and of Switch: routing, capacity, both losses, and experts sharded over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from minipar.model.moe import MoE
from minipar.spec.question import Given, Question, sends, specification
from minipar.spec.varied import AGAIN, FLOAT32, LARGE, PLAIN, STRIDED, Kind
from minipar.spec.words import generator, normal

CERTAIN = Kind("with logits of hundreds", scale=300.0)
D, HIDDEN = 6, 5
EXPERTS = ("gate", "up", "down")
# By seed. 200 tokens, 4 experts and a factor of 1.1 give a capacity of 55; in floats, 50 * 1.1 would round up to 56.
CAPACITIES, SAMPLES = (1.25, 4.0, 1.25, 0.5, 1.1, 1.25), (1, 1, 2, 2, 1, 2)


def _experts(draw: torch.Generator, size: int, kind: Kind) -> Given:
    """Draw each rank's part of 2p experts."""
    given: Given = [{} for _ in range(size)]
    for name in EXPERTS:
        shape = (D, HIDDEN) if name == "down" else (HIDDEN, D)
        for mine, part in zip(given, kind.rounded(normal(draw, 2 * size, *shape)).chunk(size)):
            mine[name] = part.clone()
    return given


def _weights(given: Given) -> list[Tensor]:
    return [torch.cat([mine[name] for mine in given]) for name in EXPERTS]


def _draw_rows(size: int, seed: int, kind: Kind) -> Given:
    """Draw each rank's rows, sorted by expert. From seed 2 on, the last rank has no rows; large: an expert gets 2,049."""
    draw = generator(size, seed, 5)
    experts = _experts(draw, size, kind)
    counts = [torch.randint(400 if kind.large else 4, (2 * size,), generator=draw) for _ in range(size)]
    if 2 <= seed < 5:
        counts[-1].zero_()
    if kind.large:
        counts[0][0] = 2049
    if kind.seed:  # the same counts, but other rows
        draw = generator(size, seed, kind.seed)
    rows = [kind.rounded(normal(draw, int(n.sum()), D)) for n in counts]
    rows[0] = kind.with_nan(rows[0])
    return [{"rows": x, "counts": n, **weights} for x, n, weights in zip(rows, counts, experts)]


def _expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def _dispatched(given: Given) -> list[list[Tensor]]:
    whole = _weights(given)
    parts = [zip(mine["rows"].split(mine["counts"].tolist()), *whole) for mine in given]
    return [[torch.cat([_expert(*part) for part in of_rank])] for of_rank in parts]


def _crossing(given: Given, rank: int) -> range:
    """Its rows to other ranks, and results of other ranks' rows back to them, forward and backward; at most all counts."""
    p = len(given)
    sent = torch.stack([mine["counts"] for mine in given]).view(p, p, -1).sum(2)  # [from, to]
    away = int(sent[rank].sum() + sent[:, rank].sum() - 2 * sent[rank, rank])
    rows = 2 * away * D * 8
    return range(rows, rows + (p - 1) * 8 * 2 * p + 1)


def _draw_tokens(size: int, seed: int, kind: Kind) -> Given:
    draw = generator(size, seed, kind.seed)
    many = size == 2 and seed == 4
    T, samples = 120 if kind.large else 200 if many else 7, SAMPLES[seed]
    router = kind.rounded(normal(draw, 2 * size, D)) * kind.scale
    experts = _experts(draw, size, kind)
    factor = 0.5 if kind.large else CAPACITIES[seed]
    xs = [kind.rounded(normal(draw, 1 if r else samples, T, D)) for r in range(size)]
    return [{"x": x, "router": router, **mine, "capacity_factor": factor} for x, mine in zip(xs, experts)]


def _switched(given: Given) -> list[list[Tensor]]:
    router, (gate, up, down) = given[0]["router"], _weights(given)
    layer = MoE(D, HIDDEN, len(router), 1, given[0]["capacity_factor"], balance_coef=1.0, z_coef=1.0).double()
    weights = {"router.weight": router, "experts.gate": gate, "experts.up": up, "experts.down": down}
    answers = []
    for mine in given:
        y, metrics = functional_call(layer, weights, (mine["x"],))
        dropped = torch.as_tensor(metrics.dropped).long()
        answers.append([y, metrics.balance_loss, metrics.z_loss, dropped])
    return answers


DISPATCH = Question(_draw_rows, _dispatched, ("the experts' results, in the order of its rows,",))
SWITCH = Question(
    _draw_tokens,
    _switched,
    ("the output", "the balance loss", "the z-loss", "the number of dropped tokens"),
    summands=("router",),
)
SPECIFICATIONS = [
    specification(
        "dispatch",
        "dispatch(comm, rows, counts, gate, up, down)",
        "Each row goes to the rank of its expert, and its result comes back to its place.",
        [DISPATCH],
        [sends(DISPATCH, _crossing, "rows that cross, forward and backward, and counts")],
    ),
    specification(
        "switch",
        "switch(comm, x, router, gate, up, down, capacity_factor) -> (y, balance_loss, z_loss, dropped)",
        "Each token's first expert answers, if it has room; the experts are spread over ranks, and nothing depends on how.",
        [SWITCH],
        kinds=(PLAIN, FLOAT32, STRIDED, CERTAIN, LARGE, AGAIN),
    ),
]
