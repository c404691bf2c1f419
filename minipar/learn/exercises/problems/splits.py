"""Problems of lessons 08 and 09: experts, and sequences over ranks."""

from __future__ import annotations

from math import ceil

from minipar.cost.collectives import sent_share
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA = 1e9, 1e12


@problem("08", ep=(4, 8, 64), flops=(200, 400, 800), bandwidth=(50, 200, 400))
def expert_width_that_pays_for_its_messages(ep: int, flops: int, bandwidth: int) -> Card:
    return Card(
        f"Experts over {ep} ranks, each with three matrices of h x F, {flops} TFLOP/s; dispatch and combine "
        f"send bf16 rows of width h over {bandwidth} GB/s, evenly to all. Which F makes the products of a "
        "forward take as long as its two all-to-alls?",
        2 / 3 * sent_share("all_to_all", ep) * flops * TERA / (bandwidth * GIGA),
        "features",
        (
            "a row: products 6 h F/C; messages 2 * 2 h (ep-1)/ep /W",
            "they are equal at F = 2/3 (ep-1)/ep C/W",
            f"2/3 * {ep - 1}/{ep} * {flops}e12/{bandwidth}e9",
        ),
    )


@problem(
    "08",
    load=((30, 9, 14, 11), (25, 3, 20, 16), (16, 40, 2, 6), (9, 13, 31, 7, 22, 16, 10, 20)),
    factor=(1.0, 1.25, 1.5),
)
def dropped_tokens(load: tuple[int, ...], factor: float) -> Card:
    tokens, experts = sum(load), len(load)
    capacity = ceil(tokens * factor / experts)
    return Card(
        f"Switch: {tokens} tokens of a sequence choose among {experts} experts, {', '.join(map(str, load))} of "
        f"them each; capacity factor {factor:g}. How many are dropped?",
        sum(max(0, rows - capacity) for rows in load),
        "tokens",
        (
            f"capacity: ceil({tokens}/{experts} * {factor:g}) = {capacity}; what each expert has above it is dropped",
            " + ".join(f"max(0, {rows} - {capacity})" for rows in load),
        ),
        0.0,
    )


@problem("08", ep=(4, 8, 32), tokens=(4096, 8192), width=(4096, 7168), top_k=(1, 2, 8))
def bytes_of_a_layer_of_experts(ep: int, tokens: int, width: int, top_k: int) -> Card:
    return Card(
        f"A layer of experts over ep = {ep}: each of a rank's {tokens} tokens goes to {top_k} experts, evenly "
        f"spread, in bf16 rows of width {width}; capacity factor 1. How many MB does a rank send, forward and "
        "backward?",
        4 * top_k * tokens * width * 2 * sent_share("all_to_all", ep) / 1e6,
        "MB",
        (
            "dispatch and combine, forward and backward: 4 all-to-alls, of each (ep-1)/ep",
            f"4 * {top_k} * {tokens} * {width} * 2 * {ep - 1}/{ep} / 1e6",
        ),
    )


@problem("09", flops=(200, 400, 800), bandwidth=(25, 50, 100, 450), group=(1, 4, 8))
def tokens_for_ring_attention(flops: int, bandwidth: int, group: int) -> Card:
    return Card(
        f"Ring attention without a mask, bf16, {group} times as many query heads as key/value heads; a GPU "
        f"reaches {flops} TFLOP/s and sends {bandwidth} GB/s to its neighbour. How many tokens must each rank "
        "have, at least, for the messages of the forward to hide behind its products?",
        flops * TERA / (bandwidth * GIGA * group),
        "tokens",
        (
            "a step: products 4 n^2 h/C; keys and values 2 * 2 n (h/g)/W",
            "they are equal at n = C/(W g)",
            f"{flops}e12 / ({bandwidth}e9 * {group})",
        ),
    )


@problem("09", p=(2, 4, 8, 16))
def gain_of_zigzag(p: int) -> Card:
    return Card(
        f"Causal ring attention over {p} ranks; its steps keep pace with the busiest rank. How many times "
        "longer does it take with contiguous parts than with zigzag parts? (Long sequences: count areas, a "
        "diagonal block as a half.)",
        (p - 0.5) / (p / 2),
        "times",
        (
            "contiguous: the last rank computes p-1 whole blocks and a half; zigzag: every rank a p-th of p^2/2 blocks",
            "(p - 1/2) / (p/2) = 2 - 1/p",
            f"2 - 1/{p}",
        ),
    )


@problem("09", p=(4, 8), tokens=(32768, 131072), heads=((32, 8), (32, 32), (64, 8)))
def bytes_of_ulysses(p: int, tokens: int, heads: tuple[int, int]) -> Card:
    queries, keys = heads
    return Card(
        f"Ulysses over {p} ranks, a sequence of {tokens} tokens in all, {queries} query heads and {keys} "
        "key/value heads of 128 features, bf16. How many MB does a rank send in a layer's forward?",
        2 * (queries + keys) * 128 * 2 * tokens / p * sent_share("all_to_all", p) / 1e6,
        "MB",
        (
            "q, k, v and the output, each N/p tokens, of which (p-1)/p leave: 2 (a + a_kv) d e N (p-1)/p^2",
            f"2 * ({queries} + {keys}) * 128 * 2 * {tokens} * {p - 1}/{p}**2 / 1e6",
        ),
    )
