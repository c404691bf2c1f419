"""Memory and time of serving a model: the bytes that a decode step reads, the requests that fit, and tp's messages.

A decode step generates one token for each of B requests. It reads all weights once and the KV cache of every request from
memory, and multiplies B rows. On today's GPUs reading memory takes longer than arithmetic, up to a few hundred rows:

    reading     (weights + B * S * cache of a token) / bandwidth of the memory
    arithmetic  2 * parameters * B / rate
    tp          2 all-reduces per layer, of B * dim elements: few bytes, but each waits for its hops

The prefill of T tokens takes 2 * parameters * T operations in a few large products, and 2 T^2 dim per layer for attention
under a causal mask, so arithmetic decides its time. A step of an MoE model is assumed to read all parameters, as a large
batch does, and to compute with the active ones.

An all-reduce over tp is "ring", with 2 (tp - 1) hops, or "direct", with one hop: every rank reads the vectors of all tp - 1
other ranks, as engines do for the few rows of a decode step.

`decode_time` uses the machine's data sheet, so it is a lower bound; `in_a_run` gives the machine with the rates that runs
reach.

The hops take what NCCL's protocol for long messages takes; with its protocol for short ones, rings of a few kilobytes wait
about a third of it.

Left out: kernel launches, sampling, dequantization, and the arithmetic of a decode step's attention. Latent attention has
the most of this arithmetic: each element of its cache takes about 4 h operations, an element of keys or values 2 h / h_kv.
Source: Pope et al., arXiv:2211.05102, section 2; the latencies are NCCL's, see machines.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from minipar.cost.machines import Machine
from minipar.cost.models import ModelShape, core_width, whole_latent_elems
from minipar.support.errors import one_of, require_divides, require_positive

ALL_REDUCES = ("ring", "direct")
GROUP = 64  # number of values that share a scale, or a min and a step, if quantized to fewer than 16 bits
ACTIVATION_BYTES = 2


class Bits(NamedTuple):
    """Bits of a stored weight and of a stored key or value: 16, 8, 4 or 2."""

    weights: int = 16
    cache: int = 16


SIXTEEN = Bits()


@dataclass(frozen=True)
class StepTime:
    """The time of one forward of the model, by part. Memory reads and arithmetic overlap; tp's messages do not."""

    weights_s: float
    cache_s: float
    arithmetic_s: float
    messages_s: float

    @property
    def reading_s(self) -> float:
        return self.weights_s + self.cache_s

    @property
    def step_s(self) -> float:
        return max(self.reading_s, self.arithmetic_s) + self.messages_s

    @property
    def bound(self) -> str:
        """The part that takes most of the time."""
        if self.messages_s > max(self.reading_s, self.arithmetic_s):
            return "waiting for tp"
        if self.arithmetic_s > self.reading_s:
            return "arithmetic"
        return "reading weights" if self.weights_s >= self.cache_s else "reading the cache"


def in_a_run(machine: Machine) -> Machine:
    """Return the machine with the rates that a run reaches, instead of those of its data sheet.

    Memory and links reach only the fraction `share` of their data-sheet bandwidth. Matrix products reach the same fraction
    of `matmul_fraction` times the peak. For a measured machine, `share` is 1.
    """
    fraction = machine.matmul_fraction * machine.share
    return replace(
        machine,
        peak_flops=machine.peak_flops * fraction,
        hbm_bytes_per_s=machine.hbm_bytes_per_s * machine.share,
        link_bytes_per_s=machine.link_bytes_per_s * machine.share,
        card_bytes_per_s=machine.card_bytes_per_s * machine.share,
        attention_fraction=min(1.0, machine.attention_fraction / fraction),
        matmul_fraction=1.0,
        share=1.0,
    )


def stored_bytes(bits: int, group: int = GROUP) -> float:
    """Return the bytes per stored value: 2 for 16 bits, else (bits + 32 / g) / 8, with its share of a group's min and step.

    g is the number of values in a group.
    """
    if bits not in (16, 8, 4, 2):
        raise ValueError(f"bits={bits}; use 16, 8, 4 or 2")
    return 2.0 if bits == 16 else (bits + 32 / group) / 8


def cache_token_bytes(shape: ModelShape, bits: int = 16, block_size: int = 16) -> float:
    """Return the bytes of a token's keys and values in all layers: 2 L h_kv d e; with latent attention L (c + r) e.

    In fewer than 16 bits, keys share a min and a step over the tokens of a block, values over a group of features.
    Raises ValueError for latents in fewer than 16 bits, which are not supported.
    """
    if shape.kv_latent_dim:
        if bits != 16:
            raise ValueError(f"bits={bits} of a cache of latents, which are not rounded; use 16")
        return 2.0 * shape.num_layers * (shape.kv_latent_dim + shape.rope_dim)
    key_bytes, value_bytes = stored_bytes(bits, block_size), stored_bytes(bits, min(GROUP, shape.head_dim))
    return shape.num_layers * shape.kv_dim * (key_bytes + value_bytes)


def cache_elems(
    num_heads: int, head_dim: int, num_kv_heads: int, kv_latent_dim: int, rope_dim: int
) -> dict[str, int]:
    """Return the number of elements that a layer caches per token, for each kind of attention with the same heads.

    MHA  2 h d       GQA  2 h_kv d       MQA  2 d       MLA  c + r

    Source: DeepSeek-V2, arXiv:2405.04434, table 1.
    """
    return {
        "MHA": 2 * num_heads * head_dim,
        "GQA": 2 * num_kv_heads * head_dim,
        "MQA": 2 * head_dim,
        "MLA": kv_latent_dim + rope_dim,
    }


def rank_cache_token_bytes(shape: ModelShape, tp: int, bits: int = 16) -> float:
    """Return the bytes of a token's cache on a tp rank. Heads are not split: with tp above h_kv, ranks hold copies of them.

    Every head uses the whole latent, so each rank holds all of it: tp does not shrink the cache of latent attention.
    """
    require_divides("tp", tp, "num_heads", shape.num_heads)
    if shape.kv_latent_dim:
        return cache_token_bytes(shape, bits)
    return cache_token_bytes(shape, bits) / min(tp, shape.num_kv_heads)


def rank_weight_bytes(shape: ModelShape, tp: int = 1, bits: int = 16) -> float:
    """Return the bytes of weights on a tp rank: 1/tp of all but the matrices that compute latents, which are not split."""
    whole = 0
    if shape.kv_latent_dim:
        whole = shape.num_layers * whole_latent_elems(shape)
    return ((shape.num_params - whole) / tp + whole) * stored_bytes(bits)


def all_reduces_s(
    shape: ModelShape, machine: Machine, num_rows: int, tp: int, algorithm: str = "ring"
) -> float:
    """Return the time of a forward's all-reduces, two per layer, of `num_rows` rows each.

    Hops have the latency of NCCL's protocol Simple. For messages this short NCCL takes LL, whose hops are shorter, but
    published decodes wait longer than LL's hops explain.
    """
    if algorithm not in ALL_REDUCES:
        raise ValueError(f"all_reduce={algorithm!r} is unknown; use {one_of(ALL_REDUCES)}")
    if tp == 1:
        return 0.0
    hops, share = (2 * (tp - 1), 2 * (tp - 1) / tp) if algorithm == "ring" else (1, tp - 1)
    sent_bytes = share * num_rows * shape.dim * ACTIVATION_BYTES
    waiting_s = machine.start_latency_s + hops * machine.link_latency_s
    return 2 * shape.num_layers * (waiting_s + sent_bytes / machine.link_bytes_per_s)


def decode_time(
    shape: ModelShape,
    machine: Machine,
    batch: int,
    context: int,
    tp: int = 1,
    bits: Bits = SIXTEEN,
    all_reduce: str = "ring",
) -> StepTime:
    """Return the time of a decode step for `batch` requests with `context` tokens each.

    Raises ValueError if tp does not divide the heads, or does not fit in a node.
    """
    require_positive(batch=batch, context=context, tp=tp)
    _require_in_node(machine, tp)
    cache_bytes = batch * context * rank_cache_token_bytes(shape, tp, bits.cache)
    return StepTime(
        weights_s=rank_weight_bytes(shape, tp, bits.weights) / machine.hbm_bytes_per_s,
        cache_s=cache_bytes / machine.hbm_bytes_per_s,
        arithmetic_s=2 * shape.num_active_params * batch / tp / machine.peak_flops,
        messages_s=all_reduces_s(shape, machine, batch, tp, all_reduce),
    )


def prefill_s(shape: ModelShape, machine: Machine, num_tokens: int, tp: int = 1) -> float:
    """Return the time of a prefill's products, without attention and messages: 2 P T / (the rate that a run reaches)."""
    rate = machine.peak_flops * machine.matmul_fraction * machine.share
    return 2 * shape.num_active_params * num_tokens / tp / rate


def prefill_time(
    shape: ModelShape, machine: Machine, num_tokens: int, tp: int = 1, bits: Bits = SIXTEEN
) -> StepTime:
    """Return the time to prefill a prompt in one forward. Its all-reduces are large, so they are rings.

    Raises ValueError if tp does not divide the heads, or does not fit in a node.
    """
    require_positive(num_tokens=num_tokens, tp=tp)
    require_divides("tp", tp, "num_heads", shape.num_heads)
    _require_in_node(machine, tp)
    attention_flops = num_tokens**2 * core_width(shape) * shape.num_layers / tp
    return StepTime(
        weights_s=rank_weight_bytes(shape, tp, bits.weights) / machine.hbm_bytes_per_s,
        cache_s=0.0,
        arithmetic_s=prefill_s(shape, machine, num_tokens, tp)
        + attention_flops / (machine.peak_flops * machine.attention_fraction),
        messages_s=all_reduces_s(shape, machine, num_tokens, tp),
    )


def transfer_s(shape: ModelShape, machine: Machine, num_tokens: int, tp: int = 1, bits: int = 16) -> float:
    """Return the time to send these tokens' KV cache to another node, each rank's heads through one network card."""
    cards = min(tp, shape.num_kv_heads, machine.cards_per_node)
    return num_tokens * cache_token_bytes(shape, bits) / (cards * machine.card_bytes_per_s)


def most_requests(
    shape: ModelShape, machine: Machine, context: int, tp: int = 1, bits: Bits = SIXTEEN
) -> int:
    """Return how many requests of `context` tokens fit in memory with the weights; 0 if not even one does."""
    left = machine.memory_bytes - machine.context_bytes - rank_weight_bytes(shape, tp, bits.weights)
    return max(0, int(left // (context * rank_cache_token_bytes(shape, tp, bits.cache))))


def rows_where_arithmetic_begins(machine: Machine, element_bytes: float = 2) -> float:
    """Return the number of rows above which a product takes longer than reading its weight: rate e / (2 bandwidth)."""
    return machine.peak_flops * element_bytes / (2 * machine.hbm_bytes_per_s)


def _require_in_node(machine: Machine, tp: int) -> None:
    if tp > machine.gpus_per_node:
        raise ValueError(
            f"tp={tp} exceeds the {machine.gpus_per_node} GPUs of a node; use {machine.gpus_per_node} or fewer"
        )
