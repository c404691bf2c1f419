"""Bytes that a rank holds at the worst moment of a step, itemised.

    parameters       w P, and with ZeRO-3 w P/N
    gradients        g P; with ZeRO-2 and -3 g P/N, but g P while they accumulate over several microbatches, and with ZeRO-2
                     in a pipeline
    optimizer state  k P, and with ZeRO k P/N
                     ZeRO-3 does not shard tied embeddings in a pipeline, nor their stages' other parameters outside layers
    gathered units   ZeRO-3: this rank's embedding, last norm and head, the running layer and the next layer
    activations      live chunks x layers per chunk x `layer_bytes`; recompute="every:N" keeps one input per N layers;
    recomputation    all activations of the layers that are recomputed together
    logits           for each live microbatch of the last stage, per token: (w + 2 e) D for the last norm, and w V of
                     log-probabilities, or with tp e V/t of logits; w = max(4, e). During the loss's backward also their
                     gradients: 2 w V, or with tp e V/t. Logits are freed before layers are recomputed, so
                     `recomputation` counts only what it needs beyond them
    buffers          two gradient buckets, or all gradients if those are fewer bytes; the messages that a stage receives;
                     for context parallelism, two blocks of keys and values (ring), the whole sequence's keys and values
                     (all_gather), or the q, k, v and o sent (ulysses)
    context          CUDA's context and libraries

P parameters on this rank, sharded over N ranks (dp x cp; for experts dp x cp / ep); w, g and k are the precision's bytes
per parameter for weights, gradients and optimizer state.
"""

from __future__ import annotations

from functools import cache

from minipar.cost.activations import bytes_of_units, layer_bytes
from minipar.cost.layout import PRECISIONS, Job, Layout
from minipar.cost.ranks import (
    bucket_elems,
    ends_elems,
    held_by,
    held_elems,
    layer_kinds_elems,
    rank_kinds,
    unsharded_elems,
)
from minipar.cost.stages import RankContents, live_chunks, live_heads
from minipar.support.errors import require_positive

ITEMS = (
    "parameters", "gradients", "optimizer state", "gathered units", "activations", "recomputation", "logits", "buffers",
    "context",
)  # fmt: skip


def model_state_bytes(num_params: float, ranks: int = 1, zero: int = 0, precision: str = "mixed") -> float:
    """Return the bytes of parameters, gradients and optimizer state per rank, by ZeRO stage.

    In mixed precision, stages 0 to 3 hold 16 P, 4 P + 12 P/N, 2 P + 14 P/N and 16 P/N.
    Source: arXiv:1910.02054, section 5 and figure 1.
    """
    require_positive(ranks=ranks)
    b = PRECISIONS[precision]
    whole = [b.weight, b.gradient, b.state]
    cut = (zero >= 3, zero >= 2, zero >= 1)
    return sum(n * num_params / (ranks if is_cut else 1) for n, is_cut in zip(whole, cut))


def rank_memory(job: Job, layout: Layout, rank: int) -> dict[str, float]:
    """Return the bytes of each of ITEMS on the ranks with pp coordinate `rank`."""
    return held_memory(job, layout, held_by(job, layout, rank))


def held_memory(job: Job, layout: Layout, held: RankContents) -> dict[str, float]:
    """Return the bytes of each of ITEMS on a rank with contents `held`."""
    return {
        **_states(job, layout, held),
        "gathered units": _gathered(job, layout, held),
        **_activations(job, layout, held),
        "buffers": _buffers(job, layout, sum(held_elems(job, layout, held))),
        "context": job.machine.context_bytes,
    }


def worst_rank_memory(job: Job, layout: Layout) -> tuple[int, dict[str, float]]:
    """Return the pp coordinate of the rank that holds the most bytes, and its bytes by item.

    Among ranks with the same layers the first holds the most, because live activations never increase from rank to rank.
    """
    kinds = rank_kinds(job, layout.schedule, layout.pp, layout.chunks)
    found = [(held.rank, held_memory(job, layout, held)) for held in kinds]
    return max(found, key=lambda pair: sum(pair[1].values()))


def _states(job: Job, layout: Layout, held: RankContents) -> dict[str, float]:
    b = job.bytes_of
    dense, expert = held_elems(job, layout, held)
    unsharded = unsharded_elems(job, layout, held)
    ranks = layout.dp * layout.cp // (job.implementation.replicate if layout.zero == 3 else 1)
    expert_sharers = max(1, ranks * (layout.tp if job.implementation.fold_experts else 1) // layout.ep)
    whole = dense + expert
    shard = unsharded + -(-(dense - unsharded) // ranks) + -(-expert // expert_sharers)
    # ZeRO-2's optimizer reduces a pipeline's gradients after the step; FSDP, during the last backward of each stage.
    at_once = layout.microbatches(job) == 1 and (layout.zero == 3 or layout.pp == 1)
    sharded_gradients = layout.zero >= 2 and (at_once or job.implementation.reduce_every == "microbatch")
    return {
        "parameters": b.weight * (shard if layout.zero == 3 else whole),
        "gradients": b.gradient * (shard if sharded_gradients else whole),
        "optimizer state": b.state * (shard if layout.zero else whole),
    }


def _gathered(job: Job, layout: Layout, held: RankContents) -> float:
    if layout.zero < 3 or layout.dp * layout.cp == 1:
        return 0.0
    largest = max(sum(elems) for elems in layer_kinds_elems(job, layout.tp, layout.ep))
    units = min(2, held.num_layers) * largest
    roots = ends_elems(job, layout, held) - unsharded_elems(job, layout, held)
    return job.bytes_of.weight * (units + roots)


@cache
def activation_bytes(job: Job, tp: int, cp: int, microbatch: int, recompute: str, experts: bool) -> float:
    """Return the bytes that a layer keeps for one microbatch."""
    how = job.implementation
    return layer_bytes(
        job.shape, job.seq_len // cp, microbatch, tp, how.sequence_parallel and tp > 1, recompute, job.seq_len,
        how.attention == "dense", job.bytes_of.activation, experts, how.fused,
    )  # fmt: skip


def _activations(job: Job, a: Layout, held: RankContents) -> dict[str, float]:
    m, tokens = a.microbatches(job), a.tokens(job)
    of_chunk, recomputed = _chunk_bytes(job, a, held)
    kept, of_backward = _logits_bytes_per_token(job, a)
    return {
        "activations": of_chunk * live_chunks(a.schedule, held.rank, a.pp, m, a.chunks),
        "recomputation": max(recomputed - held.last * tokens * (kept + of_backward), 0.0),
        "logits": held.last * tokens * (live_heads(a.schedule, m) * kept + of_backward),
    }


def _logits_bytes_per_token(job: Job, a: Layout) -> tuple[float, float]:
    """Return (kept, more in the backward): bytes per token of the last norm, the head's output and the loss.

    torch's cross-entropy keeps log-probabilities in 32 bits or more, and its backward makes two gradients of that size; the
    loss over tp keeps the logits as they are, and makes one gradient.
    """
    shape, e = job.shape, job.bytes_of.activation
    wide, split = max(4, e), a.tp if job.implementation.sequence_parallel else 1
    norm = ((wide + 2 * e) * shape.dim + wide) / split
    if a.tp == 1:
        return wide * shape.vocab_size + norm, 2 * wide * shape.vocab_size
    return e * shape.vocab_size / a.tp + norm, e * shape.vocab_size / a.tp


def _chunk_bytes(job: Job, a: Layout, held: RankContents) -> tuple[float, float]:
    """Return the bytes that the layers of one chunk keep, and the extra bytes while a unit of layers is recomputed."""

    def kept(recompute: str, experts: bool) -> float:
        return activation_bytes(job, a.tp, a.cp, a.microbatch, recompute, experts)

    whole = kept("none", held.num_moe > 0)
    if a.unit > 1:
        own, layers = kept("full", False), -(-held.num_layers // a.chunks)
        of_chunk, most = bytes_of_units(layers, a.unit, whole, own)
        # `- own`: the input of the unit being recomputed is already counted in `of_chunk`
        return of_chunk, most - of_chunk - own
    of_all = 0.0
    for number, experts in ((held.num_layers - held.num_moe, False), (held.num_moe, True)):
        of_all += number * kept(a.recompute, experts) if number else 0.0
    return of_all / a.chunks, whole - kept(a.recompute, held.num_moe > 0)


def _buffers(job: Job, layout: Layout, elems: int) -> float:
    e, tokens = job.bytes_of.activation, layout.tokens(job)
    ranks = layout.dp * layout.cp
    in_flight = job.bytes_of.gradient * min(2 * bucket_elems(job, layout), elems)
    buckets = in_flight * (ranks > 1)
    split = layout.tp if job.implementation.sequence_parallel else 1
    received = 2 * e * tokens * job.shape.dim / split * (layout.pp > 1)
    return buckets + received + (_context_buffers(job, layout) if layout.cp > 1 else 0.0)


def _context_buffers(job: Job, layout: Layout) -> float:
    shape = job.shape
    # Bytes of two tensors with one element per token: times the heads' width for keys and values, or for q and o.
    both = 2 * job.bytes_of.activation * layout.tokens(job)
    kv = both * shape.num_kv_heads * shape.core_head_dim / min(layout.tp, shape.num_kv_heads)
    if layout.cp_attention == "ulysses":
        return both * shape.num_heads * shape.core_head_dim / layout.tp + kv
    return kv * (2 if layout.cp_attention == "ring" else layout.cp)
