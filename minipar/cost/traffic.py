"""Bytes that a rank sends in a step, by mesh axis. Tests compare these formulas with the library's own counters.

N tokens of a rank in a step, over all its microbatches; width D, e bytes per activation; t = tp, c = cp, P = dp x cp:

    tp     a multiple of (t-1)/t N D e: 8 per layer (four all-reduces), 2 for the embedding and 2 for the head. With
           sequence parallelism, the backward gathers each column-parallel input again: 2 more per layer, 1 more for the
           head. recompute="full" adds 2 per layer (3 with sequence parallelism, 4 with dropout); "every:N" adds 4 per
           layer, but less for the last of N layers. The loss adds 3 elements per token. A parallel block without experts
           has half as many all-reduces: 4 per layer in place of 8, and 1 in place of 2 with sequence parallelism;
           recomputation adds 0 (1 with sequence parallelism, 2 with dropout) with "full", and 2 with "every:N". Latent
           attention adds 2 (t-1)/t N (c + r) e per layer, for the gradients of its latents; norms of queries and keys
           add 4 (t-1)/t d e per layer and microbatch, for those of their weights
    pp     per chunk, N D e to the next stage and as much back; divided by t with sequence parallelism. With tied embeddings
           the first and the last rank exchange V D/t gradients per step
    cp     per layer, 2 N D_kv/t (c-1) e forward; backward the same again, plus as many gradient elements of at least 4
           bytes. ulysses: (c-1)/c N (2 D + 2 D_kv)/t e forward and as much backward
    ep     per layer with experts, 4 k CF N D e (ep-1)/ep for dispatch and combine, forward and backward, CF being the
           capacity factor; 6 instead of 4 if layers are recomputed. Each of t tp ranks sends all of it, or 1/t of it with
           `fold_experts`
    dp     2 (P-1)/P of the rank's gradients (zero 0, 1, 2), in the bytes in which they are summed; with ZeRO-2 and
           reduce_every="microbatch", (m+1) (P-1)/P. ZeRO-1 and -2 gather weights in place of half of it.
           ZeRO-3 gathers weights twice per microbatch, or three times if they are recomputed (except in the last layer of a
           unit), and sends gradients once, or m times with reduce_every="microbatch". For embedding and head see
           `root_gathers`; tied ones in a pipeline are not gathered, and 2 (P-1)/P of their gradients are sent. With
           replicate=R, P/R replaces P, and 2 (R-1)/R of a shard's gradients are added

"""

from __future__ import annotations

from typing import NamedTuple

from minipar.config.context_limits import ulysses_ranks
from minipar.config.rules import expert_ranks
from minipar.cost.layout import Job, Layout
from minipar.cost.links import Links, axis_links, links_of
from minipar.cost.models import ModelShape, whole_latent_elems
from minipar.cost.ranks import end_stages_elems, ends_elems, held_by, held_elems, table_elems, unsharded_elems
from minipar.cost.stages import RankContents, live_heads
from minipar.schedules.registry import SCHEDULES


class Sent(NamedTuple):
    """Bytes that a rank sends over an axis in a step: in total, and out of its node (the mean over its group)."""

    total: float
    leaving: float


def step_traffic(job: Job, layout: Layout, rank: int) -> dict[str, Sent]:
    """Return the bytes that the rank with pp coordinate `rank` sends in a step over each of tp, pp, cp, ep, dp and edp."""
    by_axis = {
        "tp": _tp(job, layout, rank),
        "pp": _pp(job, layout, rank),
        "cp": _cp(job, layout, rank),
        "ep": _ep(job, layout, rank),
    }
    sent = {axis: _sent(job, layout, axis, num_bytes) for axis, num_bytes in by_axis.items()}
    for axis, (shards, copies) in zip(("dp", "edp"), _gradient_parts(job, layout, rank)):
        within, between = sharding_links(job, layout, axis)
        leaving = shards * within.leaving_share + copies * between.leaving_share
        sent[axis] = Sent(shards + copies, leaving)
    return sent


def sharding_links(job: Job, layout: Layout, axis: str) -> tuple[Links, Links]:
    """Return (shards, copies) for dp or edp: the links of a group that holds all shards, and of ranks with the same shard.

    Without hybrid sharding the first group is the whole axis, and the second has one rank.
    """
    copies = job.implementation.replicate if layout.zero == 3 else 1
    fold = job.implementation.fold_experts
    whole = axis_links(job.machine, layout, axis, fold)
    stride = layout.tp * (layout.ep if axis == "edp" else 1) // (layout.tp if fold and axis == "edp" else 1)
    shards = whole.size // copies
    return links_of(job.machine, shards, stride), links_of(job.machine, copies, stride * shards)


def _sent(job: Job, layout: Layout, axis: str, num_bytes: float) -> Sent:
    links = axis_links(job.machine, layout, axis, job.implementation.fold_experts)
    return Sent(num_bytes, num_bytes * links.leaving_share)


def hidden_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the hidden states of one microbatch: tokens x D, before tp splits tokens."""
    return layout.tokens(job) * job.shape.dim * job.bytes_of.activation


def tp_sums(job: Job, layout: Layout, experts: bool) -> tuple[float, float]:
    """Return (forward, backward): how many all-reduces of the hidden states a layer makes over tp.

    Attention and the MLP have one each; a parallel block has one for both, unless it has experts, which need their own.
    The backward includes those of recomputation.
    """
    split, dropout = job.implementation.sequence_parallel, job.shape.dropout
    folded = experts and job.implementation.fold_experts and not job.shape.shared_dim
    sums = 1 if (job.shape.parallel_block and not experts) or folded else 2
    # Recomputation omits a unit's last all-reduce, whose result is used only by a dropout. With `split` it omits only the
    # second half, the all-gather.
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
    latents = held.num_layers * latent_width(shape) * (1 + 0.5 * split * (layout.unit > 0))
    whole = (shape.norms_per_layer * held.num_layers + held.last) * shape.dim
    if shape.kv_latent_dim:
        whole += held.num_layers * (whole_latent_elems(shape) + shape.kv_latent_dim + shape.q_latent_dim)
    of_heads = 2 * shape.head_dim * held.num_layers * shape.qk_norm
    elems = (sums * shape.dim + routed + latents) * tokens + m * (split * whole + of_heads)
    return 2 * (t - 1) / t * (elems * e + held.last * 3 * tokens * max(4, e))


def latent_width(shape: ModelShape) -> int:
    """Return the elements per token of a layer's latents, whose gradients tp sums; 0 without latent attention."""
    if not shape.kv_latent_dim:
        return 0
    return shape.kv_latent_dim + shape.rope_dim + shape.q_latent_dim


def message_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of a stage's output, as one tp rank sends it."""
    return hidden_bytes(job, layout) / (layout.tp if job.implementation.sequence_parallel else 1)


def _pp(job: Job, layout: Layout, rank: int) -> float:
    if layout.pp == 1:
        return 0.0
    held = held_by(job, layout, rank)
    hops = 2 * layout.chunks - held.first - held.last
    if SCHEDULES[layout.schedule].v_shaped:
        # The last rank holds both stages at the turn of the V: nothing is sent between them.
        hops -= 2 * (rank == layout.pp - 1)
    tied = tied_bytes(job, layout) * (held.first or held.last)
    return hops * layout.microbatches(job) * message_bytes(job, layout) + tied


def tied_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of gradients that the ranks with the first and the last stage exchange: those of tied embeddings.

    In a V-shaped schedule one rank has both stages, and sends nothing.
    """
    if not job.shape.tie_embeddings or layout.pp == 1 or SCHEDULES[layout.schedule].v_shaped:
        return 0.0
    return job.bytes_of.gradient * table_elems(job, layout)


def _cp(job: Job, layout: Layout, rank: int) -> float:
    layers = held_by(job, layout, rank).num_layers
    return layers * layout.microbatches(job) * sum(cp_layer_bytes(job, layout))


def cp_layer_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return (forward, backward): bytes that a rank sends over cp for one layer's attention.

    A ring or an all-gather sends keys and values, and in the backward also their gradients; ulysses sends q, k, v and o.
    """
    shape, e = job.shape, job.bytes_of.activation
    kv_heads = max(1, shape.num_kv_heads // layout.tp)
    group = ulysses_ranks(layout.cp, layout.cp_attention, job.implementation.cp_ulysses)
    # In a group with fewer key/value heads than ranks, each head goes to every rank that uses it.
    read = max(kv_heads, group) if group > 1 else kv_heads
    width = (shape.num_heads // layout.tp + read) * shape.core_head_dim
    both = 2 * layout.tokens(job) * width * (group - 1) / group * e
    kv = 2 * layout.tokens(job) * read * shape.core_head_dim * (layout.cp // group - 1)
    return both + kv * e, both + kv * (e + max(4, e))


def _ep(job: Job, layout: Layout, rank: int) -> float:
    layers = held_by(job, layout, rank).num_moe
    times = 6 if layout.unit else 4
    return (
        times * layers * layout.microbatches(job) * dispatch_bytes(job, layout) * (layout.ep - 1) / layout.ep
    )


def dispatch_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the rows in one all-to-all of one layer, including rows that stay on their rank.

    Each tp rank dispatches all tokens, or with `fold_experts` its own part of them.
    """
    rows = job.shape.top_k * job.shape.capacity_factor * hidden_bytes(job, layout)
    return rows / (layout.tp if job.implementation.fold_experts else 1)


def gradients_bytes(job: Job, layout: Layout, rank: int) -> tuple[float, float]:
    """Return (dp, edp): bytes that a rank sends for gradients and gathered weights of dense and expert parameters."""
    dense, expert = _gradient_parts(job, layout, rank)
    return sum(dense), sum(expert)


def _gradient_parts(job: Job, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """Return, for dp and edp, the bytes that a rank sends to ranks with other shards, and to ranks with the same shard."""
    held = held_by(job, layout, rank)
    dense, expert = held_elems(job, layout, held)
    b, reduced, how, m = job.bytes_of, job.reduced_bytes, job.implementation, layout.microbatches(job)
    sent, ends, unsharded = [], root_gathers(job, layout, held), unsharded_elems(job, layout, held)
    sharers = layout.dp * layout.cp
    of_experts = expert_ranks(layout.dp, layout.cp, layout.tp, how.fold_experts) // layout.ep
    for elems, whole, ranks, roots in (
        (dense - unsharded, unsharded, sharers, ends),
        (expert, 0, of_experts, []),
    ):
        copies = how.replicate if layout.zero == 3 else 1
        shards = ranks // copies
        # Bytes per parameter of the two halves of an all-reduce: the reduce-scatter, then the all-gather.
        once, again = reduced, reduced if layout.zero == 0 else b.weight
        if layout.zero > 1 and how.reduce_every == "microbatch":
            once *= m
        num_bytes: float = (once + again) * elems
        if layout.zero == 3:
            of_layers = elems - sum(root for root, _ in roots)
            gathered = m * gathers(layout) * of_layers + sum(root * n for root, n in roots)
            num_bytes = once * elems + b.weight * gathered + 2 * reduced * whole
        between = 2 * (copies - 1) / copies * reduced * (elems / shards + whole)
        sent.append((num_bytes * (shards - 1) / shards, between))
    return sent


def gathers(layout: Layout) -> float:
    """Return how often ZeRO-3 gathers a layer's weights per microbatch, on average over the layers of a unit.

    ZeRO-3 gathers a layer's weights twice, and a third time to recompute the layer. Only the last layer of a recomputed
    unit needs no third gather.
    """
    return 3 - 1 / layout.unit if layout.unit else 2


def root_gathers(job: Job, layout: Layout, held: RankContents) -> list[tuple[int, int]]:
    """Return (elements, gathers in a step) of each ZeRO-3 root on the rank. A root holds the parameters outside the layers.

    Each forward gathers the root, and leaves it gathered until another unit, or the next forward, begins. So the gathers
    are, for u microbatches:

    no pipeline       u     the backward begins in the root, which is still gathered
    the first stage   2 u   the backward begins in the last layer, which reshards the root, so it is gathered again
    the last stage    u + live_heads - 1    as without a pipeline, but a backward that directly follows another backward
                            gathers the root again, since the earlier backward has resharded it
    """
    units = layout.microbatches(job)
    if layout.pp == 1:
        return [(ends_elems(job, layout, held), units)]
    if unsharded_elems(job, layout, held):
        return []
    again = live_heads(layout.schedule, units) - 1
    first, last = end_stages_elems(job, layout)
    return [(first, 2 * units)] * held.first + [(last, units + again)] * held.last


def critical_tokens_per_gpu(ranks: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the tokens per GPU and step below which plain data parallelism waits for its gradients.

    For P parameters in 16 bits the all-reduce sends 2 (n-1)/n * 2 P bytes; a backward of 4 P * tokens FLOPs hides it if

        tokens = (n-1)/n * rate / bandwidth        for every P
    """
    return (ranks - 1) / ranks * flops_per_s / bytes_per_s
