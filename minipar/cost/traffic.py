"""Bytes that a rank sends in a step, by mesh axis: formulas that the library's tests hold to its counters.

N tokens of a rank in a step, over all its microbatches; D the width, e bytes an activation, t tp ranks, P dp x cp ranks:

    tp     (t-1)/t N D e times 8 a layer (four all-reduces) and 2 for the embedding and for the head; with sequence
           parallelism 2 a layer and 1 for the head more, since backward gathers each column-parallel input again;
           recompute="full" 2 a layer (3 with sequence parallelism, 4 with dropout); "every:N" 4 a layer, but for the last
           of N layers. Besides, 3 numbers a token for the loss.
           A parallel block without experts: 4, 1, 0 (1, 2) and 2 a layer in place of 8, 2, 2 (3, 4) and 4
    pp     N D e to the next stage and as much back, per chunk; over t with sequence parallelism
    cp     2 N D_kv/t (c-1) e forward per layer, as much again backward, and as many elements of gradients, 4 bytes or more;
           ulysses (c-1)/c N (2 D + 2 D_kv)/t e forward and as much backward
    ep     4 k CF N D e (ep-1)/ep per layer with experts: dispatch and combine, forward and backward; 6 where layers are
           computed again; also over t
    dp     2 (P-1)/P of the rank's gradients (zero 0, 1, 2); ZeRO-2 with reduce_every="microbatch" (m+1) (P-1)/P; ZeRO-3
           sends gathered weights twice a microbatch, three times but for the last layer of a unit that is computed again,
           and gradients once; replicate=R: P/R for P, and 2 (R-1)/R of a shard's gradients

Samples in s slices send as much, but for what goes once a microbatch: norms' gradients with sequence parallelism, and
ZeRO-3's weights, once a slice.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.cost.layout import Job, Layout
from minipar.cost.links import axis_links
from minipar.cost.ranks import ends_elems, held_by, held_elems
from minipar.schedules.registry import V_SHAPED


class Sent(NamedTuple):
    """Bytes that a rank sends over an axis in a step, and those of them that leave its node, averaged over its group."""

    total: float
    leaving: float


def step_traffic(job: Job, layout: Layout, rank: int) -> dict[str, Sent]:
    """Return what a rank with this pp coordinate sends over tp, pp, cp, ep, dp and edp in a step."""
    by_axis = {
        "tp": _tp(job, layout, rank),
        "pp": _pp(job, layout, rank),
        "cp": _cp(job, layout, rank),
        "ep": _ep(job, layout, rank),
        "dp": gradients_bytes(job, layout, rank)[0],
        "edp": gradients_bytes(job, layout, rank)[1],
    }
    return {axis: _sent(job, layout, axis, num_bytes) for axis, num_bytes in by_axis.items()}


def _sent(job: Job, layout: Layout, axis: str, num_bytes: float) -> Sent:
    links = axis_links(job.machine, layout, axis)
    return Sent(num_bytes, num_bytes * links.leaving_share)


def hidden_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the hidden states of one microbatch: tokens x D, before tp splits tokens."""
    return layout.tokens(job) * job.shape.dim * job.bytes_of.activation


def tp_sums(job: Job, layout: Layout, experts: bool) -> tuple[float, float]:
    """Return (forward, backward): all-reduces of the hidden states per layer over tp; those of a recomputation backward.

    Attention and MLP each have one, a parallel block one for both; but experts sum for themselves.
    """
    split, dropout = job.implementation.sequence_parallel, job.shape.dropout
    sums = 1 if job.shape.parallel_block and not experts else 2
    # What the last message of a unit makes is not used, unless a dropout follows; with `split` its first half is.
    spared = 0 if dropout else 0.5 if split else 1
    again = sums - spared / layout.unit if layout.unit else 0
    return sums, sums * (1 + split / 2) + again


def _tp(job: Job, layout: Layout, rank: int) -> float:
    held = held_by(job, layout, rank)
    m, t, split = layout.microbatches(job), layout.tp, job.implementation.sequence_parallel
    tokens, shape, e = m * layout.tokens(job), job.shape, job.bytes_of.activation
    layers = ((held.num_layers - held.num_moe, False), (held.num_moe, True))
    sums = sum(number * sum(tp_sums(job, layout, experts)) for number, experts in layers)
    sums += held.first + held.last * (1 + 0.5 * split)
    routed = shape.top_k * held.num_moe
    norms = split * (shape.norms_per_layer * held.num_layers + held.last) * m * layout.slices * shape.dim
    elems = sums * tokens * shape.dim + routed * tokens + norms
    return 2 * (t - 1) / t * (elems * e + held.last * 3 * tokens * max(4, e))


def message_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of a stage's output, as one tp rank sends it."""
    how = job.implementation
    return hidden_bytes(job, layout) / (layout.tp if how.sequence_parallel or how.scatter_pipeline else 1)


def _pp(job: Job, layout: Layout, rank: int) -> float:
    if layout.pp == 1:
        return 0.0
    held = held_by(job, layout, rank)
    hops = 2 * layout.chunks - held.first - held.last
    if (
        layout.schedule in V_SHAPED
    ):  # the last rank holds both stages of the turn: nothing is sent between them
        hops -= 2 * (rank == layout.pp - 1)
    return hops * layout.microbatches(job) * message_bytes(job, layout)


def _cp(job: Job, layout: Layout, rank: int) -> float:
    layers = held_by(job, layout, rank).num_layers
    return layers * layout.microbatches(job) * sum(cp_layer_bytes(job, layout))


def cp_layer_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return (forward, backward): bytes that a rank sends for attention over cp, per layer.

    Keys and values, and backward their gradients too, around a ring or gathered; or, with ulysses, all of q, k, v and o.
    """
    shape, e = job.shape, job.bytes_of.activation
    kv_heads, group = max(1, shape.num_kv_heads // layout.tp), ulysses_ranks(job, layout)
    # Inside a group, where there are fewer key/value heads than ranks, each of them goes to all ranks that read it.
    read = max(kv_heads, group) if group > 1 else kv_heads
    width = shape.dim // layout.tp + read * shape.head_dim
    both = 2 * layout.tokens(job) * width * (group - 1) / group * e
    kv = 2 * layout.tokens(job) * read * shape.head_dim * (layout.cp // group - 1)
    return both + kv * e, both + kv * (e + max(4, e))


def ulysses_ranks(job: Job, layout: Layout) -> int:
    """Return the ranks that exchange heads for tokens; a ring or an all-gather joins such groups."""
    return {"ulysses": layout.cp, "usp": job.implementation.cp_ulysses}.get(layout.cp_attention, 1)


def _ep(job: Job, layout: Layout, rank: int) -> float:
    layers = held_by(job, layout, rank).num_moe
    times = 6 if layout.unit else 4
    return (
        times * layers * layout.microbatches(job) * dispatch_bytes(job, layout) * (layout.ep - 1) / layout.ep
    )


def dispatch_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the rows that one all-to-all of one layer moves, those that stay with their rank included."""
    return job.shape.top_k * job.shape.capacity_factor * hidden_bytes(job, layout)


def gradients_bytes(job: Job, layout: Layout, rank: int) -> tuple[float, float]:
    """Return (dp, edp): bytes that a rank sends for gradients and gathered weights of dense and of expert parameters."""
    held = held_by(job, layout, rank)
    dense, expert = held_elems(job, layout, held)
    b, how, m = job.bytes_of, job.implementation, layout.microbatches(job)
    sent, ends = [], ends_elems(job, layout.tp, held.first, held.last)
    sharers = layout.dp * layout.cp
    for elems, ranks, root in ((dense, sharers, ends), (expert, sharers // layout.ep, 0)):
        copies = how.replicate if layout.zero == 3 else 1
        shards = ranks // copies
        once, again = (
            b.gradient,
            b.gradient if layout.zero == 0 else b.weight,
        )  # the two halves of an all-reduce
        if layout.zero == 2 and how.reduce_every == "microbatch":
            once *= m * layout.slices
        num_bytes = (once + again) * elems
        if layout.zero == 3:  # what is outside the layers is gathered once
            units = m * layout.slices
            num_bytes = once * elems + b.weight * units * (gathers(layout) * (elems - root) + root)
        between = 2 * (copies - 1) / copies * b.gradient * elems / shards
        sent.append(num_bytes * (shards - 1) / shards + between)
    return sent[0], sent[1]


def gathers(layout: Layout) -> float:
    """Return how often ZeRO-3 gathers a layer's weights for a microbatch: once more in units, but for the last of each."""
    return 3 - 1 / layout.unit if layout.unit else 2


def critical_tokens_per_gpu(ranks: int, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the tokens per GPU and step below which plain data parallelism waits for its gradients.

    For P parameters in 16 bits the all-reduce sends 2 (n-1)/n 2 P bytes, and a backward of 4 P tokens FLOPs hides it:

        tokens = (n-1)/n * rate / bandwidth        whatever P is
    """
    return (ranks - 1) / ranks * flops_per_s / bytes_per_s
