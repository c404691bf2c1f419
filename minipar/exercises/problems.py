"""Ten problems for pen and paper: round numbers drawn afresh, the answer by the simulator or the cost model, a worked line.

Each function draws its numbers from `rng` and returns a Card. The worked line is the way by hand: a test holds its last
number equal to the answer.
"""

from __future__ import annotations

from math import ceil, sqrt
from random import Random
from typing import NamedTuple

from minipar.cost.collectives import collective_s, hierarchical_all_reduce_s
from minipar.cost.memory import model_state_bytes
from minipar.cost.traffic import critical_tokens_per_gpu
from minipar.schedules import one_f_one_b, simulate
from minipar.schedules.costs import Costs


class Card(NamedTuple):
    """A question, its answer in `unit`, and the line that leads there. `within` is the tolerance, relative."""

    question: str
    answer: float
    unit: str
    worked: str
    within: float = 0.05


def largest_data_parallel_size(rng: Random) -> Card:
    tokens, flops, bandwidth = (
        rng.choice([1, 2, 4, 8]) * 10**6,
        rng.choice([200, 400, 800]),
        rng.choice([12.5, 25, 50]),
    )
    answer = 1 + tokens * bandwidth * 1e9 / (flops * 1e12)
    needed = critical_tokens_per_gpu(answer, flops * 1e12, bandwidth * 1e9)
    assert abs(needed - tokens / answer) < 1e-6 * needed
    return Card(
        f"A dense model is trained on {tokens / 1e6:g} million tokens a step, on GPUs that reach {flops} "
        f"TFLOP/s and each send {bandwidth:g} GB/s. bf16 gradients, a ring all-reduce, hidden behind the "
        "backward. From which "
        "number of data-parallel GPUs on is it no longer hidden?",
        answer,
        "GPUs",
        f"4 P B/(N C) = 2 (N-1)/N 2 P/W, so N = 1 + B W/C = 1 + {tokens / 1e6:g}e6 * {bandwidth:g}e9 / "
        f"{flops}e12 = {answer:.4g}",
    )


def microbatches_for_a_bubble(rng: Random) -> Card:
    p, percent = rng.choice([4, 6, 8, 12, 16]), rng.choice([4, 5, 8, 10, 20])
    by_hand = ceil((p - 1) * 100 / percent)
    timelines = ((m, simulate(one_f_one_b(p, m), Costs())) for m in range(max(1, by_hand - 3), by_hand + 4))
    answer = next(m for m, timeline in timelines if timeline.bubble_over_ideal <= percent / 100 + 1e-9)
    return Card(
        f"1F1B on {p} pipeline ranks. How many microbatches does it take at least for a bubble of "
        f"{percent} % of the ideal time?",
        answer,
        "microbatches",
        f"(p-1)/m <= {percent / 100:g}, so m >= {p - 1}/{percent / 100:g} = {(p - 1) * 100 / percent:.4g}, "
        f"m = {by_hand}",
        0.0,
    )


def memory_of_a_model(rng: Random) -> Card:
    billions, n, zero = rng.choice([7, 13, 30, 70, 175]), rng.choice([8, 16, 64, 256]), rng.randint(0, 3)
    answer = model_state_bytes(billions * 1e9, n, zero) / 1e9
    kept, cut = ((16, 0), (4, 12), (2, 14), (0, 16))[zero]
    name = f"ZeRO-{zero}" if zero else "plain data parallelism"
    return Card(
        f"{billions}B parameters, Adam in mixed precision (2 bytes of weight, 2 of gradient, 12 of "
        f"state), {n} data-parallel "
        f"GPUs, {name}. How many GB of parameters, gradients and states does each hold?",
        answer,
        "GB",
        f"({kept} + {cut}/{n}) bytes * {billions}e9 = {answer:.4g}",
    )


def tokens_for_ring_attention(rng: Random) -> Card:
    flops, bandwidth, group = (
        rng.choice([200, 400, 800]),
        rng.choice([25, 50, 100, 450]),
        rng.choice([1, 4, 8]),
    )
    # 4 n^2 h FLOPs per block against 2 n h/g elements of 2 bytes sent.
    answer = flops * 1e12 / (bandwidth * 1e9 * group)
    return Card(
        f"Ring attention without a mask, bf16, {group} times as many query heads as key/value heads; a GPU reaches {flops} "
        f"TFLOP/s and sends {bandwidth} GB/s to its neighbour. How many tokens must each rank have, at "
        "least, for a step's messages to hide "
        "behind its products?",
        answer,
        "tokens",
        f"4 n^2 h/C >= 2 * 2 n (h/g)/W, so n >= C/(W g) = {flops}e12/({bandwidth}e9 * {group}) = {answer:.4g}",
    )


def bytes_of_tensor_parallelism(rng: Random) -> Card:
    t, d, layers = rng.choice([2, 4, 8]), rng.choice([4096, 8192]), rng.choice([32, 80])
    tokens = rng.choice([2048, 4096, 8192])
    answer = layers * 8 * (t - 1) / t * tokens * d * 2 / 1e9
    return Card(
        f"A Transformer of {layers} layers of width {d}, bf16, cut over tp = {t}. How many GB does each "
        "rank send for its layers, forward and "
        f"backward, for a microbatch of {tokens} tokens?",
        answer,
        "GB",
        f"4 all-reduces a layer, 2 (t-1)/t each: {layers} * 8 * {t - 1}/{t} * {tokens} * {d} * 2 bytes = "
        f"{answer:.4g}",
    )


def size_of_half_bandwidth(rng: Random) -> Card:
    p, alpha_us, bandwidth = (
        rng.choice([4, 8, 16, 64]),
        rng.choice([5, 10, 20]),
        rng.choice([10, 25, 50, 100]),
    )
    alpha, beta = alpha_us * 1e-6, 1 / (bandwidth * 1e9)
    num_bytes = p * alpha / beta
    total = collective_s("all_reduce", p, num_bytes, alpha, beta)
    assert abs(total - 2 * collective_s("all_reduce", p, num_bytes, 0.0, beta)) < 1e-9 * total
    return Card(
        f"A ring all-reduce over {p} ranks, {alpha_us} microseconds a message, {bandwidth} GB/s. At how "
        "many MB does it spend half of its time "
        "on latency?",
        num_bytes / 1e6,
        "MB",
        f"2(p-1) alpha = 2(p-1)/p n beta, so n = p alpha W = {p} * {alpha_us}e-6 * {bandwidth}e9 = "
        f"{num_bytes / 1e6:.4g}e6",
    )


def all_reduce_over_nodes(rng: Random) -> Card:
    k, g, gigabytes = rng.choice([2, 4, 16]), 8, rng.choice([1, 2, 10])
    inside, outside = rng.choice([200, 400]), rng.choice([25, 50])
    links = (0.0, 1e-9 / inside), (0.0, 1e-9 / outside)
    answer = hierarchical_all_reduce_s(k, g, gigabytes * 1e9, *links) * 1e3
    return Card(
        f"{k} nodes of {g} GPUs; {inside} GB/s between the GPUs of a node, {outside} GB/s out of the node "
        "for each GPU; no latency. How many "
        f"ms does an all-reduce of {gigabytes} GB take: inside nodes, across, inside?",
        answer,
        "ms",
        f"2*7/8 * {gigabytes}/{inside} + 2*{k - 1}/{k} * {gigabytes}/8/{outside} s, in ms = {answer:.4g}",
    )


def checkpoint_interval(rng: Random) -> Card:
    gpus, years, write_s = (
        rng.choice([256, 1024, 4096, 16384]),
        rng.choice([3, 5]),
        rng.choice([10, 30, 60, 120]),
    )
    apart_s = years * 365 * 86400 / gpus
    answer = sqrt(2 * write_s * apart_s) / 60
    return Card(
        f"{gpus} GPUs, each of which fails once in {years} years; a checkpoint stops training for "
        f"{write_s} s. How many minutes between "
        "checkpoints lose the least time (Young)?",
        answer,
        "minutes",
        f"failures {apart_s:.4g} s apart; sqrt(2 * {write_s} * {apart_s:.4g}) s, in minutes = {answer:.4g}",
    )


def dropped_tokens(rng: Random) -> Card:
    experts, factor = rng.choice([4, 8]), rng.choice([1.0, 1.25, 1.5])
    tokens = experts * 16
    cuts = sorted(rng.sample(range(1, tokens), experts - 1))
    load = [b - a for a, b in zip([0, *cuts], [*cuts, tokens])]
    capacity = ceil(tokens * factor / experts)
    answer = sum(max(0, n - capacity) for n in load)
    return Card(
        f"Switch: {tokens} tokens of a sequence choose among {experts} experts, {', '.join(map(str, load))} "
        "of them each; capacity factor "
        f"{factor:g}. How many are dropped?",
        answer,
        "tokens",
        f"capacity {tokens}/{experts} * {factor:g} = {capacity}; what each has above it, added: {answer}",
        0.0,
    )


def utilization(rng: Random) -> Card:
    billions, tokens, peak = rng.choice([7, 13, 70]), rng.choice([300, 400, 500]), rng.choice([312, 989])
    tokens = tokens * 70 // billions
    answer = 100 * 6 * billions * 1e9 * tokens / (peak * 1e12)
    return Card(
        f"A dense {billions}B model trains at {tokens} tokens a second and GPU, on GPUs of {peak} TFLOP/s "
        "peak. What is the MFU in %, without "
        "attention's own products?",
        answer,
        "%",
        f"6 * {billions}e9 * {tokens} / {peak}e12, in % = {answer:.4g}",
    )


PROBLEMS = (
    largest_data_parallel_size,
    microbatches_for_a_bubble,
    memory_of_a_model,
    tokens_for_ring_attention,
    bytes_of_tensor_parallelism,
    size_of_half_bandwidth,
    all_reduce_over_nodes,
    checkpoint_interval,
    dropped_tokens,
    utilization,
)
