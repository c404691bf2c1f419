"""Seconds of arithmetic, by one rule for every layer, model and machine:

    matrix products   FLOPs / (peak * matmul_fraction * share), or bytes / (HBM bandwidth * share) if that is longer
    flash attention   FLOPs that the mask leaves / (peak * attention_fraction * share)
    everything else   bytes read and written / (HBM bandwidth * share)

matmul_fraction is the machine's best measured product, attention_fraction a measured kernel; share is what is left of
either best in a run: products not of the best shape, kernels that do not fill the GPU, launches, clocks under load.
It is not fitted: it is 0.8, the fraction of a link's speed that is taken as reached, too.

Norms, dropouts, activation functions, rotary embeddings and stored attention scores read and write memory and compute next
to nothing. Per token, forward, in elements of e bytes; the backward takes twice as long:

    GPT     two norms 4 h, two residual sums with bias and dropout 6 h and a mask 2 h/e; over t: 8 h for q, k, v and their
            transposes, GELU 2 ffn, and, where scores are stored, a keys (5 + 1/e)
    Llama   two norms 4 h, two residual sums 6 h; over t: rotary 2 (h + h_kv), SwiGLU 3 F

A parallel block has one norm and one mask, and two sums as before: of its halves, and the residual's.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from minipar.cost.layout import Job
from minipar.cost.models import ModelShape, layer_matmul_elems


class Seconds(NamedTuple):
    """Of one microbatch: forward, and the backward's input-gradient and weight-gradient halves."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return sum(self)


def layer_seconds(job: Job, tokens: int, tp: int, experts: bool) -> Seconds:
    """Return the arithmetic of one layer for `tokens` tokens of a rank, without recomputation and without communication."""
    shape, flash = (
        job.shape,
        job.implementation.attention != "dense",
    )  # whose backward computes the scores again
    layer = shape.moe_every - 1 if experts else 0
    elems = layer_matmul_elems(shape, layer) if experts or not shape.num_experts else _dense_elems(shape)
    matrices = max(
        2 * elems * tokens / tp / _matmul_rate(job), _operand_bytes(job, elems, tokens, tp) / _hbm_rate(job)
    )
    core = core_seconds(job, tokens, tp)
    memory = _memory_elems(job, tp) * job.bytes_of.activation * tokens / _hbm_rate(job)
    return Seconds(matrices + core + memory, matrices + (2.5 if flash else 2) * core + 2 * memory, matrices)


def core_seconds(job: Job, tokens: int, tp: int) -> float:
    """Return the forward of a layer's attention core: two products; a flash kernel skips what the causal mask hides."""
    flops = 4 * job.seq_len * job.shape.dim * tokens / tp
    if job.implementation.attention == "dense":
        return flops / _matmul_rate(job)
    return flops / 2 / (_matmul_rate(job) * job.machine.attention_fraction / job.machine.matmul_fraction)


def core_again_seconds(job: Job, tokens: int, tp: int) -> float:
    """Return what selective recomputation repeats of a layer: the core, and reading and writing its stored scores."""
    passes = _score_elems(job, tp) * job.bytes_of.activation * tokens / _hbm_rate(job)
    return core_seconds(job, tokens, tp) + passes


def head_seconds(job: Job, tokens: int, tp: int) -> Seconds:
    """Return the head and the loss: its product, and float32 logits written, read and turned into their gradient."""
    product = 2 * job.shape.dim * job.shape.vocab_size * tokens / tp / _matmul_rate(job)
    passes = 12 * job.shape.vocab_size * tokens / tp / _hbm_rate(job)
    return Seconds(product + passes, product + passes, product)


def optimizer_seconds(job: Job, elems: float) -> float:
    """Return the update of `elems` parameters: gradient, master, two moments read, and all but the gradient written."""
    b = job.bytes_of
    return elems * (b.gradient + 2 * b.state + b.weight) / _hbm_rate(job)


def _matmul_rate(job: Job) -> float:
    machine = job.machine
    slower = 1 if job.bytes_of.activation == 2 else machine.float32_slowdown
    return machine.peak_flops * machine.matmul_fraction * machine.share / slower


def _hbm_rate(job: Job) -> float:
    return job.machine.hbm_bytes_per_s * job.machine.share


def _operand_bytes(job: Job, elems: int, tokens: int, tp: int) -> float:
    """Bytes that a layer's products read and write: with few tokens a rank, weights are more work to read than to use.

    Per token, whole on every rank: inputs of q, k, v and of the MLP, outputs of o and of the MLP; over tp: the others.
    """
    shape = job.shape
    width = (3 if shape.gated else 2) * shape.hidden_dim * (shape.top_k if shape.num_experts else 1)
    moved = 4 * shape.dim + (2 * (shape.dim + shape.kv_dim) + width) / tp
    return job.bytes_of.activation * (elems / tp + tokens * moved)


def _dense_elems(shape: ModelShape) -> int:
    """The matrix elements of a layer without experts, in a model that has some."""
    return (
        2 * shape.dim * (shape.dim + shape.kv_dim) + (3 if shape.gated else 2) * shape.dim * shape.hidden_dim
    )


@cache
def _memory_elems(job: Job, tp: int) -> float:
    shape, e = job.shape, job.bytes_of.activation
    split = tp if job.implementation.sequence_parallel else 1
    norms = shape.norms_per_layer
    outside = (6 + 2 * norms) * shape.dim + norms * shape.dim / e * shape.dropout
    inside = 2 * (shape.dim + shape.kv_dim) + 3 * shape.hidden_dim
    if not shape.gated:
        inside = 8 * shape.dim + 2 * shape.hidden_dim
    return outside / split + inside / tp + _score_elems(job, tp)


def _score_elems(job: Job, tp: int) -> float:
    if job.implementation.attention != "dense":
        return 0.0
    return job.shape.num_heads * job.seq_len * (5 + 1 / job.bytes_of.activation) / tp
