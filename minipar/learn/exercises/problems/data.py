"""Problems of lessons 02, 03 and 20: data parallelism, ZeRO, the batch."""

from __future__ import annotations

from math import ceil

from minipar.cost.collectives import sent_share
from minipar.cost.memory import model_state_bytes
from minipar.cost.traffic import critical_tokens_per_gpu
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA = 1e9, 1e12


@problem("02", millions=(1, 2, 4, 8), flops=(200, 400, 800), bandwidth=(12.5, 25, 50))
def largest_data_parallel_size(millions: int, flops: int, bandwidth: float) -> Card:
    return Card(
        f"A dense model is trained on {millions} million tokens a step, on GPUs that reach {flops} TFLOP/s and "
        f"each send {bandwidth:g} GB/s. bf16 gradients, a ring all-reduce, hidden behind the backward. From "
        "which number of data-parallel GPUs on is it no longer hidden?",
        1 + millions * 1e6 * bandwidth * GIGA / (flops * TERA),
        "GPUs",
        (
            "backward 4 P B/(N C), all-reduce 2 (N-1)/N 2 P/W, each with P parameters",
            "they are equal at N = 1 + B W/C",
            f"1 + {millions}e6 * {bandwidth:g}e9 / {flops}e12",
        ),
    )


@problem("02", tokens=(512, 1024, 2048), p=(8, 64, 512), flops=(400, 500), bandwidth=(25, 50))
def hidden_part_of_an_all_reduce(tokens: int, p: int, flops: int, bandwidth: int) -> Card:
    needed = critical_tokens_per_gpu(p, flops * TERA, bandwidth * GIGA)
    return Card(
        f"{p} data-parallel GPUs reach {flops} TFLOP/s and send {bandwidth} GB/s each; each has {tokens} "
        "tokens a step. How much of the ring all-reduce of bf16 gradients, in %, can the backward hide?",
        100 * tokens / needed,
        "%",
        (
            "of P parameters: backward 4 P n/C, all-reduce 2(p-1)/p 2 P/W",
            "their ratio is n W/C p/(p-1)",
            f"100 * {tokens} * {bandwidth}e9/{flops}e12 * {p}/{p - 1}",
        ),
    )


@problem("02", billions=(1, 3, 7), p=(8, 64, 256), latency=(5, 10), megabytes=(10, 25, 100))
def latency_of_all_buckets(billions: int, p: int, latency: int, megabytes: int) -> Card:
    buckets = ceil(2 * billions * 1e9 / (megabytes * 1e6))
    return Card(
        f"bf16 gradients of {billions} billion parameters are all-reduced in buckets of {megabytes} MB around "
        f"a ring of {p} ranks, {latency} microseconds a message. How many ms is the latency of all of them "
        "together?",
        buckets * 2 * (p - 1) * latency * 1e-3,
        "ms",
        (
            f"buckets: 2 P over the size of one, {2 * billions}e9/{megabytes}e6 = {buckets}",
            "each has 2(p-1) steps",
            f"{buckets} * 2 * {p - 1} * {latency}e-6 * 1e3",
        ),
    )


@problem("03", p=(8, 64, 256), flops=(200, 400, 800), bandwidth=(25, 50, 400))
def tokens_that_hide_a_gather(p: int, flops: int, bandwidth: int) -> Card:
    return Card(
        f"FSDP over {p} GPUs gathers a layer's bf16 weights while the forward of the layer before runs. A GPU "
        f"reaches {flops} TFLOP/s, and sends {bandwidth} GB/s in a ring. How many tokens does a microbatch of "
        "a GPU need for that to be hidden?",
        critical_tokens_per_gpu(p, flops * TERA, bandwidth * GIGA),
        "tokens",
        (
            "of P parameters: forward 2 P n/C, all-gather (p-1)/p 2 P/W",
            "they are equal at n = (p-1)/p C/W",
            f"{p - 1}/{p} * {flops}e12/{bandwidth}e9",
        ),
    )


@problem("03", billions=(7, 13, 30, 70, 175), p=(8, 16, 64, 256), zero=(0, 1, 2, 3))
def memory_of_a_model(billions: int, p: int, zero: int) -> Card:
    whole, cut = ((16, 0), (4, 12), (2, 14), (0, 16))[zero]
    how = f"ZeRO-{zero}" if zero else "no ZeRO"
    return Card(
        f"{billions} billion parameters, Adam in mixed precision (2 bytes of weight, 2 of gradient, 12 of "
        f"state), {p} data-parallel GPUs, {how}. How many GB of parameters, gradients and states does each "
        "hold?",
        model_state_bytes(billions * GIGA, p, zero) / GIGA,
        "GB",
        (
            f"whole: {whole} bytes a parameter; cut into {p}: {cut}",
            f"({whole} + {cut}/{p}) * {billions}e9 / 1e9",
        ),
    )


@problem("03", billions=(7, 13, 70), p=(8, 64, 512), microbatches=(1, 2, 4, 8))
def bytes_of_zero3(billions: int, p: int, microbatches: int) -> Card:
    times = 2 * microbatches + 1
    return Card(
        f"ZeRO-3 of {billions} billion parameters over {p} ranks, bf16. Each of {microbatches} microbatches "
        "gathers all weights twice, and gradients are reduce-scattered once, at the end. How many GB does a "
        "rank send in a step?",
        times * sent_share("all_gather", p) * 2 * billions,
        "GB",
        (
            "(2 m + 1) passes, each (p-1)/p of 2 P bytes",
            f"(2 * {microbatches} + 1) * {p - 1}/{p} * 2 * {billions}",
        ),
    )


@problem("20", read=(40, 150, 400), step=(25, 60, 110))
def loaders_that_keep_up(read: int, step: int) -> Card:
    return Card(
        f"One worker takes {read} ms to read and tokenize a batch, a training step {step} ms. How many workers "
        "does it take, at least, for the step never to wait?",
        ceil(read / step),
        "workers",
        ("k workers give a batch each read/k: k >= read/step, rounded up", f"ceil({read} / {step})"),
        0.0,
    )


@problem("20", small=(32, 64), large=(1024, 2048), small_norm=(20, 25, 30), large_norm=(4, 5, 8))
def noise_scale_of_two_batches(small: int, large: int, small_norm: int, large_norm: int) -> Card:
    squared = (large * large_norm - small * small_norm) / (large - small)
    trace = (small_norm - large_norm) / (1 / small - 1 / large)
    return Card(
        f"The mean gradient of {small} samples has a squared norm of {small_norm}, on average; that of {large} "
        f"samples {large_norm}. How many samples is the gradient noise scale tr(S)/|G|^2?",
        trace / squared,
        "samples",
        (
            "a mean over B samples has the squared norm |G|^2 + tr(S)/B; two of them give both unknowns",
            f"|G|^2 = ({large} * {large_norm} - {small} * {small_norm}) / ({large} - {small}) = {squared:.6g}",
            f"tr(S) = ({small_norm} - {large_norm}) / (1/{small} - 1/{large}) = {trace:.6g}",
            f"{trace:.6g} / {squared:.6g}",
        ),
    )


@problem("20", noise_scale=(500, 2000, 8000), batch=(256, 1024, 4096))
def data_that_a_larger_batch_costs(noise_scale: int, batch: int) -> Card:
    return Card(
        f"The gradient noise scale is {noise_scale} samples, and the batch {batch}. By the simple model, in "
        "which a step gains 1/(1 + noise/B) of what an exact gradient would: how many times the least data "
        "does the training need?",
        1 + batch / noise_scale,
        "times",
        (
            "steps: S (1 + noise/B); data: B times that; the least is S noise, for small B",
            "B S (1 + noise/B) / (S noise) = 1 + B/noise",
            f"1 + {batch} / {noise_scale}",
        ),
    )
