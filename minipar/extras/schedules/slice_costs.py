"""The planner's formulas for samples cut into slices: the bytes kept for a slice, and the number of live slices.

For a slice of t tokens that ends at token S of its sample, a layer keeps the bytes that `layer_bytes` gives for t tokens
with S keys. It also keeps the following, depending on the attention implementation ("full": with full recomputation,
whatever the attention):

    flash      2 h_kv/tp e S, except for the first slice: all keys and values so far, concatenated for the backward
    fused      the same, and a mask of e t S, because the kernels' own causal mask needs as many queries as keys
    dense      2 h/tp e (S - t), the earlier keys and values repeated for each head, and 2 h_kv/tp e t, the slice's own
    full       2 h_kv/tp e t, the slice's own keys and values, to which later slices attend; the rest is recomputed

Later slices also attend to the keys and values of slice A. Once the backward of a later slice has run, the gradients of A's
keys and values (2 h_kv/tp e t for its t tokens) are held until A's own backward.
`sequence_slices.py` orders the slices, and `sliced_pipeline.py` keeps the keys and values. Imports no torch.
Source: Seq1F1B, arXiv:2406.03488, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from minipar.cost.activations import layer_bytes
from minipar.cost.layout import Job, Layout
from minipar.cost.memory import chunk_bytes
from minipar.cost.models import ModelShape
from minipar.cost.stages import FORMS, ClosedForms, LiveActivations, RankContents, always
from minipar.extras.schedules.slicing import equal_costs, slice_cost, whole_tokens, why_slices_illegal

SEARCHED_SLICES = (2, 4, 8, 16)


class SlicedForms(ClosedForms):
    """The formulas of seq1f1b."""

    def why_illegal(self, job: Job, layout: Layout) -> str | None:
        slices = layout.slices
        if job.shape.num_experts and job.implementation.group_tokens is None and job.seq_len % slices:
            return f"slices={slices} does not divide seq={job.seq_len}, and experts are given equal slices"
        return why_slices_illegal(slices, job.seq_len, layout.cp, _whole_tokens(job, layout.tp, slices))

    def slice_choices(self, job: Job, layout: Layout) -> tuple[int, ...]:
        layouts = [replace(layout, slices=s) for s in SEARCHED_SLICES]
        return tuple(a.slices for a in layouts if self.why_illegal(job, a) is None)

    def largest_slice(self, job: Job, layout: Layout) -> int:
        return max(sizes_of(job, layout.tp, layout.slices))

    def largest_share(self, job: Job, layout: Layout) -> float:
        return largest_share(job, layout.tp, layout.slices)

    def activations(self, job: Job, layout: Layout, held: RankContents) -> LiveActivations:
        a = layout
        of_layers = Layout(tp=a.tp, microbatch=a.microbatch, recompute=a.recompute, slices=a.slices)
        each, read, recomputed = _each_slice(job, of_layers, held.num_layers, held.num_moe)
        order = held.rank, a.pp, a.microbatches(job)
        tokens = 0.0
        if held.last:
            sizes = sizes_of(job, a.tp, a.slices)
            tokens = most_alive(sizes, (0,) * a.slices, *order) * a.microbatch
        return LiveActivations(most_alive(each, read, *order), recomputed, tokens)


def live_slices(rank: int, pp: int, m: int, chunks: int, slices: int) -> int:
    """Return the maximum number of live slices: min(p - r + s - 1, m s)."""
    return min(pp - rank + slices - 1, m * slices)


SLICED_FORMS = SlicedForms(live_slices, FORMS["1f1b"].idle, always)


def _whole_tokens(job: Job, tp: int, slices: int) -> int:
    how = job.implementation
    group = (how.group_tokens or job.seq_len // slices) if job.shape.num_experts else 1
    return whole_tokens(group, tp if how.sequence_parallel else 1)


@cache
def sizes_of(job: Job, tp: int, slices: int) -> tuple[int, ...]:
    """Return the number of tokens of each slice, as `minipar train` cuts them."""
    shape, whole = job.shape, _whole_tokens(job, tp, slices)
    return equal_costs(job.seq_len, slices, shape.dim, _matrices(shape), whole)


@cache
def largest_share(job: Job, tp: int, slices: int) -> float:
    """Return the cost of the most expensive slice divided by the mean cost; 1 if all slices cost the same."""
    costs, before = [], 0
    for tokens in sizes_of(job, tp, slices):
        costs.append(slice_cost(before, tokens, job.shape.dim, _matrices(job.shape)))
        before += tokens
    return max(costs) * slices / sum(costs)


def _matrices(shape: ModelShape) -> int:
    mlp = (3 if shape.gated else 2) * shape.dim * shape.hidden_dim
    return 2 * shape.dim * (shape.dim + shape.kv_dim) + mlp


@cache
def _each_slice(
    job: Job, a: Layout, num_layers: int, num_moe: int
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Return, for a rank: bytes kept for each slice, bytes of its key and value gradients, peak bytes of recomputation."""
    sizes, e = sizes_of(job, a.tp, a.slices), job.bytes_of.activation
    held = RankContents(0, 1, num_layers, num_moe, False, False)
    kept, waiting, recomputed = [], [], []
    for end, tokens in zip(accumulate(sizes), sizes):
        read = key_value_bytes(job.shape, tokens, a.microbatch, a.tp, e)

        def of_layer(
            recompute: str, experts: bool, before: int = end - tokens, tokens: int = tokens
        ) -> float:
            return slice_activation_bytes(job, a.tp, a.microbatch, recompute, experts, before, tokens)

        of_rank, again = chunk_bytes(a, held, of_layer, read)
        kept.append(of_rank)
        waiting.append(num_layers * read)
        recomputed.append(again)
    return tuple(kept), tuple(waiting), max(recomputed)


@cache
def slice_activation_bytes(
    job: Job, tp: int, microbatch: int, recompute: str, experts: bool, before: int, tokens: int
) -> float:
    """Return the bytes that a layer keeps for a slice of `tokens` tokens that follows `before` tokens of its sample."""
    how, e = job.implementation, job.bytes_of.activation
    kept = layer_bytes(
        job.shape, tokens, microbatch, tp, how.sequence_parallel and tp > 1, recompute, before + tokens,
        how.attention == "dense", e, experts,
    )  # fmt: skip
    return kept + slice_extra_bytes(job.shape, before, tokens, microbatch, tp, e, recompute, how.attention)


def key_value_bytes(shape: ModelShape, tokens: int, b: int, tp: int, e: int) -> float:
    """Return the bytes of a layer's keys and values on one rank, for `tokens` tokens of each of b samples."""
    return 2 * max(1, shape.num_kv_heads // tp) * shape.head_dim * tokens * b * e


def slice_extra_bytes(
    shape: ModelShape, before: int, tokens: int, b: int, tp: int, e: int, recompute: str, attention: str
) -> float:
    """Return the bytes that a layer keeps for a slice in addition to `layer_bytes`.

    The formulas are in the module's docstring.

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


def most_alive(kept: Sequence[float], waiting: Sequence[float], rank: int, pp: int, m: int) -> float:
    """Return the peak bytes of slices on a rank.

    kept[n]     bytes of slice n of a sample, held from its forward to its backward
    waiting[n]  bytes of the gradients that slice n gets from later slices, held from the sample's first backward to the
                backward of slice n

    A rank holds p - r + s - 1 slices, at most m s. Of the oldest sample, the last slices may already have run backward; of
    the newest, the last slices may not yet have run forward; the samples between these two are held completely. The pattern
    repeats after every s backwards, until the forwards end.
    """
    s = len(kept)
    units, begun, read = m * s, (0, *accumulate(kept)), (0, *accumulate(waiting))
    first = live_slices(rank, pp, m, 1, s)

    def alive(forwards: int, backwards: int) -> float:
        (samples, ahead), (gone, back) = divmod(forwards, s), divmod(backwards, s)
        return (
            (samples - gone - 1) * begun[s] + begun[ahead] + begun[s - back] + (read[s - back] if back else 0)
        )

    # The peak is after a forward of one period, or, once the forwards have ended, before a backward.
    steady = (alive(first + done, done) for done in range(min(s, units - first)))
    return max([*steady, *(alive(units, units - first + done) for done in range(min(s, first)))])
