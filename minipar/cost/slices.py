"""Samples cut into slices: the tokens of each, the bytes that it keeps, and how many of them are alive.

A slice of t tokens that ends at token S of its sample keeps in a layer, besides what a layer keeps of t tokens:

    flash      2 h_kv/t e S, where others come before it: their keys and values and its own, joined for the backward
    fused      as flash, and a mask of e t S: the kernels' own causal mask is for as many queries as keys
    dense      2 h/t e (S - t) and 2 h_kv/t e t: the earlier keys and values, repeated for each head, and its own
    full       2 h_kv/t e t, its own keys and values: later slices read them, though all else is computed again

And where a later slice's backward has run, 2 h_kv/t e t of gradients of its keys and values wait for its own.
`minipar.schedules.sequence_slices` says in which order slices run, `minipar.pipeline.slices` what a stage keeps.
Source: Seq1F1B, arXiv:2406.03488, section 3.2; TeraPipe, arXiv:2102.07988, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

from minipar.cost.models import ModelShape
from minipar.errors import one_of
from minipar.schedules.registry import SLICED
from minipar.schedules.sequence_slices import slice_tokens

if TYPE_CHECKING:
    from minipar.cost.layout import Job, Layout

SEARCHED_SLICES = (2, 4, 8, 16)
MOST_PARTS = 64  # places at which a cut is tried


def slices_obstacle(job: Job, a: Layout) -> str | None:
    """Return why samples cannot be cut into the layout's slices, in a line; None if they can, or are whole."""
    if a.schedule in SLICED and a.slices < 2:
        return f"schedule={a.schedule} needs slices of 2 or more"
    if a.slices == 1:
        return None
    if a.schedule not in SLICED:
        return f"slices={a.slices} needs schedule={one_of(SLICED)}, not {a.schedule}"
    if a.cp > 1:
        return f"slices={a.slices}: a slice sees those before it on its own rank; use cp=1, not {a.cp}"
    if job.shape.num_experts and job.implementation.group_tokens is None and job.seq_len % a.slices:
        return f"slices={a.slices} does not divide seq={job.seq_len}, and experts are given equal slices"
    parts = -(-job.seq_len // _whole_tokens(job, a.tp, a.slices))
    return (
        f"slices={a.slices}, and tp={a.tp} cuts seq={job.seq_len} into {parts} parts" * (parts < a.slices)
        or None
    )


@cache
def slice_choices(job: Job, a: Layout) -> tuple[int, ...]:
    """Return the numbers of slices, 2 and more, to consider with this layout of a sliced schedule."""
    return tuple(s for s in SEARCHED_SLICES if slices_obstacle(job, replace(a, slices=s)) is None)


def _whole_tokens(job: Job, tp: int, slices: int) -> int:
    """Tokens between two places at which a sample may be cut: not in experts' groups, nor where tp's ranks share them."""
    how = job.implementation
    group = (how.group_tokens or job.seq_len // slices) if job.shape.num_experts else 1
    return lcm(group, tp if how.sequence_parallel else 1)


@cache
def sizes_of(job: Job, tp: int, slices: int) -> tuple[int, ...]:
    """Return the tokens of each slice, as `minipar train` cuts them; one slice has them all."""
    shape, whole = job.shape, _whole_tokens(job, tp, slices)
    return equal_costs(job.seq_len, slices, shape.dim, _matrices(shape), whole)


@cache
def largest_share(job: Job, tp: int, slices: int) -> float:
    """Return the cost of the largest slice over the mean: 1 where a sample could be cut anywhere."""
    costs, before = [], 0
    for tokens in sizes_of(job, tp, slices):
        costs.append(slice_cost(before, tokens, job.shape.dim, _matrices(job.shape)))
        before += tokens
    return max(costs) * slices / sum(costs)


def _matrices(shape: ModelShape) -> int:
    mlp = (3 if shape.gated else 2) * shape.dim * shape.hidden_dim
    return 2 * shape.dim * (shape.dim + shape.kv_dim) + mlp


@cache
def equal_costs(seq_len: int, slices: int, dim: int, matrices: int, whole: int) -> tuple[int, ...]:
    """Cut a sample into slices of nearly equal cost, at multiples of `whole` tokens.

    A token costs a layer's `matrices`, and one product with each key and value up to its own: so later slices are shorter.
    All cuts cost the same together, so that whatever the stages and the microbatches, the best has the least largest slice.
    """
    if slices == 1:
        return (seq_len,)
    multiple = whole * max(1, seq_len // (whole * max(MOST_PARTS, 4 * slices)))

    def cost(before: int, tokens: int) -> int:
        return slice_cost(before, tokens, dim, matrices)

    return slice_tokens(seq_len, slices, cost, multiple=multiple)


def slice_cost(before: int, tokens: int, dim: int, matrices: int) -> int:
    """Return the multiplications of a layer's forward for `tokens` tokens with so many before them in their sample."""
    return tokens * matrices + 2 * dim * (tokens * before + tokens * (tokens + 1) // 2)


def key_value_bytes(shape: ModelShape, tokens: int, b: int, tp: int, e: int) -> float:
    """Return the bytes of a layer's keys and values of so many tokens of b samples on one rank."""
    return 2 * max(1, shape.num_kv_heads // tp) * shape.head_dim * tokens * b * e


def slice_extra_bytes(
    shape: ModelShape, before: int, tokens: int, b: int, tp: int, e: int, recompute: str, attention: str
) -> float:
    """Return what a layer keeps of a slice besides what it keeps of as many tokens, as the module says.

    recompute  "none", "selective" or "full"       attention  "flash", "fused" or "dense"
    """
    own = key_value_bytes(shape, tokens, b, tp, e)
    if recompute == "full":
        return own
    if attention == "dense" and recompute == "none":
        return 2 * shape.dim // tp * before * b * e + own
    if not before:
        return 0
    joined = key_value_bytes(shape, before + tokens, b, tp, e)
    return joined + (e * tokens * (before + tokens) if attention == "fused" else 0)


def most_alive(
    kept: Sequence[float], waiting: Sequence[float], schedule: str, rank: int, pp: int, m: int
) -> float:
    """Return the most bytes of slices that a rank holds at once.

    kept[n]     of slice n of a sample, from its forward to its backward
    waiting[n]  of gradients that it has from later slices: from the first backward of its sample to its own

    terapipe runs all m s forwards first. seq1f1b holds p - r + s - 1 slices, at most m s: whole samples, the first slices
    of one whose last ones have run backward, and of one whose last ones are still to come. Which of them they are
    repeats after s backwards, until the forwards end.
    """
    s = len(kept)
    units, begun, read = m * s, (0, *accumulate(kept)), (0, *accumulate(waiting))
    first = units if schedule == "terapipe" else min(units, pp - rank + s - 1)

    def alive(forwards: int, backwards: int) -> float:
        (samples, ahead), (gone, back) = divmod(forwards, s), divmod(backwards, s)
        return (
            (samples - gone - 1) * begun[s] + begun[ahead] + begun[s - back] + (read[s - back] if back else 0)
        )

    # After the forward that follows so many backwards; then, when forwards have ended, after those backwards.
    steady = (alive(first + done, done) for done in range(min(s, units - first + 1)))
    return max(*steady, *(alive(units, units - first + done) for done in range(min(s, first))))
