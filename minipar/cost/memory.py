"""Bytes that a rank holds at the worst moment of a step, itemised.

    parameters       w P, and with ZeRO-3 w P/N
    gradients        g P, and with ZeRO-2 and -3 g P/N; but whole where they accumulate over several microbatches
    optimizer state  k P, and with ZeRO k P/N
    gathered units   ZeRO-3: the embedding, norm and head of this rank, the layer that runs, and the next one
    activations      live chunks x layers of a chunk x `layer_bytes`; recompute="every:N" keeps one input of N layers; of
                     samples in slices as `slices.py` says
    recomputation    the layers that are computed again at once, whole
    logits           (e + 4) tokens V/t: the head's output and its float32 copy, of each live microbatch of the last stage
    buffers          two buckets of gradients; what a pipeline receives; of a cp ring two blocks of keys and values, of
                     all_gather the whole sequence's, of ulysses what is sent of q, k, v and o
    context          CUDA's context and libraries

P parameters on this rank, N ranks that share them (dp x cp; for experts dp x cp / ep), w, g, k bytes by precision.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

from minipar.cost.activations import bytes_of_units, layer_bytes
from minipar.cost.layout import PRECISIONS, Job, Layout
from minipar.cost.models import layer_elems
from minipar.cost.ranks import Held, ends_elems, held_by, held_elems, layer_kinds_elems, rank_kinds
from minipar.cost.slices import key_value_bytes, most_alive, sizes_of, slice_extra_bytes
from minipar.cost.stages import live_chunks
from minipar.errors import require_positive

BUCKET_BYTES = 25 * 2**20
ITEMS = (
    "parameters", "gradients", "optimizer state", "gathered units", "activations", "recomputation", "logits", "buffers",
    "context",
)  # fmt: skip


def model_state_bytes(num_params: float, ranks: int = 1, zero: int = 0, precision: str = "mixed") -> float:
    """Return the bytes of parameters, gradients and optimizer state per rank, by ZeRO stage.

    In mixed precision, 16 P, then 4 P + 12 P/N, 2 P + 14 P/N and 16 P/N. Source: arXiv:1910.02054, section 5 and figure 1.
    """
    require_positive(ranks=ranks)
    b = PRECISIONS[precision]
    whole = [b.weight, b.gradient, b.state]
    cut = (zero >= 3, zero >= 2, zero >= 1)
    return sum(n * num_params / (ranks if is_cut else 1) for n, is_cut in zip(whole, cut))


def rank_memory(job: Job, layout: Layout, rank: int) -> dict[str, float]:
    """Return the bytes of each of ITEMS on a rank with this pp coordinate."""
    return held_memory(job, layout, held_by(job, layout, rank))


def held_memory(job: Job, layout: Layout, held: Held) -> dict[str, float]:
    """Return the bytes of each of ITEMS on a rank that holds this."""
    return {
        **_states(job, layout, *held_elems(job, layout, held)),
        "gathered units": _gathered(job, layout, held),
        **_activations(job, layout, held),
        "buffers": _buffers(job, layout),
        "context": job.machine.context_bytes,
    }


def worst_rank_memory(job: Job, layout: Layout) -> tuple[int, dict[str, float]]:
    """Return the pp coordinate of the rank that holds most, and its bytes by item.

    Among ranks that hold alike, the first holds most: live activations never increase from rank to rank.
    """
    kinds = rank_kinds(job, layout.schedule, layout.pp, layout.chunks)
    found = [(held.rank, held_memory(job, layout, held)) for held in kinds]
    return max(found, key=lambda pair: sum(pair[1].values()))


@cache
def _dense_and_expert_elems(job: Job) -> tuple[int, int]:
    experts = sum(layer_elems(job.shape, i)[1] for i in range(job.shape.num_layers))
    return job.shape.num_params - experts, experts


def state_floor(
    job: Job, tp: int, pp: int, ranks: int, ep: int, zero: int, accumulates: bool = False
) -> float:
    """Return a lower bound of the bytes of parameters, gradients and states of the fullest of pp ranks: an even share.

    accumulates  over several microbatches, so that gradients are whole
    """
    b = job.bytes_of
    dense, experts = _dense_and_expert_elems(job)
    total = 0.0
    for elems, sharers, split in ((dense, ranks, tp * pp), (experts, ranks // ep, tp * pp * ep)):
        cut_gradients = zero >= 2 and not accumulates
        cuts = (sharers if zero >= 3 else 1, sharers if cut_gradients else 1, sharers if zero else 1)
        total += sum(n / cut for n, cut in zip((b.weight, b.gradient, b.state), cuts)) * elems / split
    return total


def _states(job: Job, layout: Layout, dense: int, expert: int) -> dict[str, float]:
    b, ranks = (
        job.bytes_of,
        layout.dp * layout.cp // (job.implementation.replicate if layout.zero == 3 else 1),
    )
    whole, shard = dense + expert, -(-dense // ranks) + -(-expert // (ranks // layout.ep))
    at_once = layout.microbatches(job) == 1 or (
        layout.zero == 2 and job.implementation.reduce_every == "microbatch"
    )
    sharded_gradients = layout.zero >= 2 and at_once
    return {
        "parameters": b.weight * (shard if layout.zero == 3 else whole),
        "gradients": b.gradient * (shard if sharded_gradients else whole),
        "optimizer state": b.state * (shard if layout.zero else whole),
    }


def _gathered(job: Job, layout: Layout, held: Held) -> float:
    if layout.zero < 3 or layout.dp * layout.cp == 1:
        return 0.0
    largest = max(sum(elems) for elems in layer_kinds_elems(job, layout.tp, layout.ep))
    units = min(2, held.num_layers) * largest
    return job.bytes_of.weight * (units + ends_elems(job, layout.tp, held.first, held.last))


@cache
def activation_bytes(
    job: Job,
    tp: int,
    cp: int,
    microbatch: int,
    recompute: str,
    experts: bool,
    before: int = 0,
    tokens: int = 0,
) -> float:
    """Return the bytes that a layer keeps of one microbatch, or of its slice of `tokens` tokens after `before` others."""
    how, e, s = job.implementation, job.bytes_of.activation, tokens or job.seq_len // cp
    kept = layer_bytes(
        job.shape, s, microbatch, tp, how.sequence_parallel and tp > 1, recompute, before + tokens or job.seq_len,
        how.attention == "dense", e, experts,
    )  # fmt: skip
    if tokens:
        kept += slice_extra_bytes(job.shape, before, tokens, microbatch, tp, e, recompute, how.attention)
    return kept


def _activations(job: Job, layout: Layout, held: Held) -> dict[str, float]:
    a, shape, m = layout, job.shape, layout.microbatches(job)
    if a.slices > 1:
        kept, again, tokens = _of_slices(job, a, held)
    else:
        live = live_chunks(a.schedule, held.rank, a.pp, m, a.chunks)
        of_chunk, again = _of_chunk(job, a, held)
        heads = min(m, max(1, live // a.chunks)) if a.schedule in ("gpipe", "breadth-first") else 1
        kept, tokens = of_chunk * live, heads * a.tokens(job)
    e = job.bytes_of.activation
    return {
        "activations": kept,
        "recomputation": max(again, 0.0),
        "logits": held.last * tokens * ((e + 4) * shape.vocab_size / a.tp + 3 * e * shape.dim),
    }


def _of_chunk(job: Job, a: Layout, held: Held, before: int = 0, tokens: int = 0) -> tuple[float, float]:
    """Bytes that a rank's layers of one chunk keep of a microbatch, or of a slice; and of layers computed again at once."""

    def kept(recompute: str, experts: bool) -> float:
        return activation_bytes(job, a.tp, a.cp, a.microbatch, recompute, experts, before, tokens)

    whole = kept("none", held.num_moe > 0)
    if a.unit > 1:
        read = key_value_bytes(
            job.shape, tokens, a.microbatch, a.tp, job.bytes_of.activation
        )  # by later slices
        own, layers = kept("full", False) - read, -(-held.num_layers // a.chunks)
        of_chunk, most = bytes_of_units(layers, a.unit, whole, own)
        return of_chunk + layers * read, most - of_chunk - own  # their first input is one that is kept
    of_all = 0.0
    for number, experts in ((held.num_layers - held.num_moe, False), (held.num_moe, True)):
        of_all += number * kept(a.recompute, experts) if number else 0.0
    return of_all / a.chunks, whole - kept(a.recompute, held.num_moe > 0)


def _of_slices(job: Job, a: Layout, held: Held) -> tuple[float, float, float]:
    """Bytes that a rank keeps of its slices, most of a slice that are computed again, and tokens of logits alive."""
    of_layers = Layout(tp=a.tp, microbatch=a.microbatch, recompute=a.recompute, slices=a.slices)
    each, read, again = _each_slice(job, of_layers, held.num_layers, held.num_moe)
    order = a.schedule, held.rank, a.pp, a.microbatches(job)
    if not held.last:
        return most_alive(each, read, *order), again, 0
    tokens = most_alive(sizes_of(job, a.tp, a.slices), (0,) * a.slices, *order)
    return most_alive(each, read, *order), again, tokens * a.microbatch


@cache
def _each_slice(job: Job, a: Layout, num_layers: int, num_moe: int) -> tuple[tuple, tuple, float]:
    """(bytes kept of each slice, gradients of its keys and values, most that are computed again) of a rank's layers."""
    sizes, e, held = (
        sizes_of(job, a.tp, a.slices),
        job.bytes_of.activation,
        Held(0, 1, num_layers, num_moe, False, False),
    )
    found = [_of_chunk(job, a, held, end - size, size) for end, size in zip(accumulate(sizes), sizes)]
    read = (num_layers * key_value_bytes(job.shape, size, a.microbatch, a.tp, e) for size in sizes)
    return tuple(kept for kept, _ in found), tuple(read), max(again for _, again in found)


def _buffers(job: Job, layout: Layout) -> float:
    e, tokens = job.bytes_of.activation, layout.tokens(job)
    if layout.slices > 1:
        tokens = layout.microbatch * max(sizes_of(job, layout.tp, layout.slices))
    buckets = 2 * BUCKET_BYTES * (layout.dp * layout.cp > 1)
    split = layout.tp if job.implementation.sequence_parallel else 1
    received = 2 * e * tokens * job.shape.dim / split * (layout.pp > 1)
    return buckets + received + (_context_buffers(job, layout) if layout.cp > 1 else 0.0)


def _context_buffers(job: Job, layout: Layout) -> float:
    shape = job.shape
    both = 2 * job.bytes_of.activation * layout.tokens(job)  # for keys and values, of one element a token
    kv = both * shape.kv_dim / min(layout.tp, shape.num_kv_heads)
    if layout.cp_attention == "ulysses":
        return both * shape.dim / layout.tp + kv
    return kv * (2 if layout.cp_attention == "ring" else layout.cp)
