"""Time of arithmetic, by one rule for every layer, model and machine:

    matrix products   FLOPs / (peak * matmul_fraction * share) + bytes / (HBM bandwidth * share)
    flash attention   unmasked FLOPs / (peak * attention_fraction * share), times 1 + 440 / tokens of a block
    everything else   bytes read and written / (HBM bandwidth * share)
    experts           products of r rows an expert: times 1 + SLOW_ROWS / r, fitted to runs of mixtures

matmul_fraction is the fraction of peak that the machine's best measured product reaches, attention_fraction that of a
measured kernel. A run keeps only `share` of either, because kernels do not fill the GPU, launches take time and clocks fall
under load. share is not fitted: it is 0.8, the fraction of a link's speed that collectives are assumed to reach.

A product of T x h by h x h does 2 T h^2 operations on about 4 T h bytes, so its rate depends on h: reading and writing take
h_0 / h of the time of its operations, with h_0 about 270 on an A100 and 470 on an H100. A roofline would take the longer of
the two; published runs lie nearer to their sum, since a kernel's first and last tiles overlap with nothing.

An attention kernel is slower on short blocks, too: FlashAttention-2 on an A100 reaches about half of its best rate with 512
tokens and nine tenths with 4,096 (arXiv:2307.08691, figure 4), which n / (n + 440) describes.

A cp ring computes attention in cp blocks and merges their results: each merge reads two float32 outputs and writes one.

Norms, dropouts, activation functions, rotary embeddings and stored attention scores read and write memory and compute next
to nothing. These are the elements (of e bytes) that a forward moves per token; the backward takes twice as long:

    GPT     two norms 4 h, two residual sums with bias and dropout 6 h, their masks 2 h/e; divided by t: q, k, v and their
            transposes 8 h, GELU 2 ffn, stored scores a keys (5 + 1/e)
    Llama   two norms 4 h, two residual sums 6 h; divided by t: rotary 2 (h + h_kv), SwiGLU 3 F
            with norms of q and k, divided by t: 2 (h + h_kv)
    MLA     besides: norms of the latents 3 (c + z), and divided by t the joining of keys with rotary keys 2 a (d + r)
    experts per routed row SwiGLU 3 F, and 8 h to sort rows before each all-to-all and after it (4 h in each direction)

A parallel block has one norm and one mask, but still two sums: attention + MLP, and the residual sum.

A rank reads the weights of all its experts, however few tokens they get.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from minipar.cost.layout import PARTIAL, Job
from minipar.cost.models import core_width, dense_matmul_elems, expert_elems, layer_matmul_elems

# The number of tokens in a block at which a flash attention kernel reaches half of its rate.
SLOW_TOKENS = 440

# The number of rows of an expert at which its products reach half of their rate, fitted to runs of mixtures.
SLOW_ROWS = 1500

# Elements read and written per routed row and feature to sort rows by expert: before and after dispatch, and for combine.
SORTED = 8


class Seconds(NamedTuple):
    """The times of one microbatch: forward, and the input-gradient and weight-gradient halves of the backward."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return sum(self)


def layer_seconds(job: Job, tokens: float, tp: int, experts: bool, ep: int = 1) -> Seconds:
    """Return the time of one layer's arithmetic for `tokens` tokens, without recomputation and communication."""
    shape = job.shape
    # A flash backward takes 2.5 times its forward, not 2, because it recomputes the scores.
    flash = job.implementation.attention != "dense"
    elems = layer_matmul_elems(shape, shape.first_moe_layer) if experts else dense_matmul_elems(shape)
    operands = _operand_bytes(job, elems, tokens, tp, ep if experts else 0) / _hbm_rate(job)
    slow = _few_rows(job, tp, ep) if experts else 0.0
    matrices = 2 * (elems * tokens + slow) / tp / _matmul_rate(job) + operands
    core = core_seconds(job, tokens, tp)
    memory = _memory_elems(job, tp, experts) * job.bytes_of.activation * tokens / _hbm_rate(job)
    backward = matrices + (2.5 if flash else 2) * core + 2 * memory
    return Seconds(matrices + core + memory, backward, matrices)


def _few_rows(job: Job, tp: int, ep: int) -> float:
    """Return the multiplications that experts' products take longer by, since each of them has few rows.

    With r rows an expert reaches r / (r + SLOW_ROWS) of the rate of a large product.
    """
    shape, fold = job.shape, job.implementation.fold_experts
    # An expert's rows are those of the ep ranks that share a set of experts, of which tp ranks may have the same tokens.
    senders = ep / tp if fold else ep
    return shape.num_experts / senders * SLOW_ROWS * expert_elems(shape)


def core_seconds(job: Job, tokens: float, tp: int, block: float | None = None) -> float:
    """Return the forward time of a layer's attention core: two products, of which a flash kernel skips masked scores.

    block  number of tokens on which a flash kernel runs at once; None: all of a sample
    """
    flops = 2 * job.seq_len * core_width(job.shape) * tokens / tp
    if job.implementation.attention == "dense":
        return flops / _matmul_rate(job)
    fraction = job.machine.attention_fraction * job.implementation.attention_speed * _cudnn_speed(job)
    rate = _matmul_rate(job) * fraction / job.machine.matmul_fraction
    return flops / 2 / rate * (1 + SLOW_TOKENS / (block or job.seq_len))


def ring_extra_seconds(job: Job, tokens: float, tp: int, cp: int) -> float:
    """Return the extra forward time of a layer's attention in cp blocks instead of one: slower small blocks, and merges.

    tokens  number of tokens on one rank

    The extra time of a backward is 2.5 times as long: it recomputes each block, and sums three gradients.
    """
    whole = core_seconds(job, tokens, tp)
    merges = (cp - 1) * 3 * 4 * job.shape.q_dim * tokens / tp / _hbm_rate(job)
    return core_seconds(job, tokens, tp, job.seq_len / cp) - whole + merges


def again_seconds(job: Job, recompute: str, tokens: float, tp: int, experts: bool, ep: int = 1) -> float:
    """Return the time of recomputing a part of a layer, or all of it.

    selective  the attention core, whose stored scores are read and written
    acts, ops  norms and activation functions; with "ops" half of the products, too
    """
    if recompute == "none":
        return 0.0
    core = core_seconds(job, tokens, tp)
    if recompute == "selective":
        return core + _score_elems(job, tp) * job.bytes_of.activation * tokens / _hbm_rate(job)
    forward = layer_seconds(job, tokens, tp, experts, ep).forward
    if recompute not in PARTIAL:
        return forward
    passes = _memory_elems(job, tp, experts) * job.bytes_of.activation * tokens / _hbm_rate(job)
    return passes + ((forward - core - passes) / 2 if recompute == "ops" else 0.0)


def head_seconds(job: Job, tokens: float, tp: int) -> Seconds:
    """Return the time of the head and the loss: a product, and three passes over float32 logits.

    The passes write the logits, read them, and turn them into their gradient.
    """
    product = 2 * job.shape.dim * job.shape.vocab_size * tokens / tp / _matmul_rate(job)
    passes = 12 * job.shape.vocab_size * tokens / tp / _hbm_rate(job)
    return Seconds(product + passes, product + passes, product)


def optimizer_seconds(job: Job, elems: float) -> float:
    """Return the time to update `elems` parameters.

    The update reads the gradient, master weights and both moments; it writes the master weights, moments and weights.
    """
    b = job.bytes_of
    return elems * (b.gradient + 2 * b.state + b.weight) / _hbm_rate(job)


def _matmul_rate(job: Job) -> float:
    machine = job.machine
    slower = 1 if job.bytes_of.activation == 2 else machine.float32_slowdown
    return (
        machine.peak_flops * machine.matmul_fraction * machine.share / slower / job.implementation.arithmetic
    )


def _hbm_rate(job: Job) -> float:
    return job.machine.hbm_bytes_per_s * job.machine.share / job.implementation.arithmetic


def _operand_bytes(job: Job, elems: int, tokens: float, tp: int, ep: int) -> float:
    """Return the bytes that a layer's products read and write. With few tokens per rank, reading weights takes longest.

    ep  ranks over which the experts are spread; 0: a layer without experts

    Each rank has the full inputs of q, k, v and of the MLP, and the full outputs of o and of the MLP; all other inputs and
    outputs are split over tp.
    """
    shape, fold = job.shape, job.implementation.fold_experts
    matrices, rows = 3 if shape.gated else 2, 1.0
    width: float = matrices * shape.dense_width
    if ep:
        rows = shape.top_k * shape.capacity_factor
        width = matrices * (shape.hidden_dim * rows + shape.shared_dim)
    split = 2 * (shape.q_dim + shape.kv_dim) + width
    whole = (2 + 2 * rows / (tp if fold and ep else 1)) * shape.dim
    if shape.kv_latent_dim:
        whole += 2 * (shape.kv_latent_dim + shape.rope_dim + shape.q_latent_dim)
        split += shape.num_heads * shape.rope_dim
    return job.bytes_of.activation * (_held_weights(job, elems, tp, ep) + tokens * (whole + split / tp))


def _held_weights(job: Job, elems: int, tp: int, ep: int) -> float:
    """Return how many elements of a layer's matrices a rank holds. A token uses `elems` of the whole layer's."""
    if not ep:
        return elems / tp
    shape, used = job.shape, job.shape.top_k * expert_elems(job.shape)
    held = shape.num_experts // ep * expert_elems(shape) / (1 if job.implementation.fold_experts else tp)
    return (elems - used) / tp + held


def _cudnn_speed(job: Job) -> float:
    narrow, wide = job.machine.cudnn_speeds if job.implementation.attention == "cudnn" else (1.0, 1.0)
    return narrow if job.shape.core_head_dim <= 64 else wide


@cache
def _memory_elems(job: Job, tp: int, experts: bool = False) -> float:
    shape, e, how = job.shape, job.bytes_of.activation, job.implementation
    split = tp if how.sequence_parallel else 1
    norms = shape.norms_per_layer
    outside = (6 + 2 * norms) * shape.dim + norms * shape.dim / e * shape.dropout
    inside: float = (2 + 2 * shape.qk_norm) * (shape.q_dim + shape.kv_dim) + 3 * shape.dense_width
    if not shape.gated:
        inside = 8 * shape.dim + 2 * shape.dense_width
    if experts:
        rows = shape.top_k * shape.capacity_factor
        inside += 3 * (rows * shape.hidden_dim + shape.shared_dim - shape.dense_width)
        # Unless experts are folded, each tp rank sorts the rows of all tokens.
        outside += SORTED * rows * shape.dim * split / (tp if how.fold_experts else 1)
    if shape.kv_latent_dim:
        outside += 3 * (shape.kv_latent_dim + shape.q_latent_dim)
        inside += 2 * shape.num_heads * shape.core_head_dim
    return outside / split + inside / tp + _score_elems(job, tp)


def _score_elems(job: Job, tp: int) -> float:
    if job.implementation.attention != "dense":
        return 0.0
    return job.shape.num_heads * job.seq_len * (5 + 1 / job.bytes_of.activation) / tp
