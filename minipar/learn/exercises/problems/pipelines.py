"""Problems of lessons 06, 07 and 23: bubbles, the two halves of a backward, and schedules between memory and bubble."""

from __future__ import annotations

from math import ceil

from minipar.cost.stages import idle_s, live_chunks
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA = 1e9, 1e12


@problem("06", width=(4096, 8192, 12288), layers=(1, 2, 4), flops=(200, 400), bandwidth=(12.5, 25, 50))
def message_beside_a_stage(width: int, layers: int, flops: int, bandwidth: float) -> Card:
    return Card(
        f"A pipeline stage has {layers} layers of width h = {width} with 12 h^2 weights each, on a GPU of "
        f"{flops} TFLOP/s. It sends its bf16 output over {bandwidth:g} GB/s. How long does the message take, "
        "in % of the stage's forward, without attention's core?",
        100 * flops * TERA / (12 * width * layers * bandwidth * GIGA),
        "%",
        (
            "a token: 2 h/W to send, 24 h^2 l/C to compute",
            "their ratio is C/(12 h l W)",
            f"100 * {flops}e12 / (12 * {width} * {layers} * {bandwidth:g}e9)",
        ),
    )


@problem("06", p=(4, 6, 8, 12, 16), percent=(4, 5, 8, 10, 20))
def microbatches_for_a_bubble(p: int, percent: int) -> Card:
    return Card(
        f"1F1B on {p} pipeline ranks. How many microbatches does it take at least for a bubble of {percent} % "
        "of the ideal time?",
        ceil((p - 1) * 100 / percent),
        "microbatches",
        ("(p-1)/m is at most the part, so m >= (p-1)/part, rounded up", f"ceil({p - 1} * 100 / {percent})"),
        0.0,
    )


@problem("06", p=(4, 8), rank=(0, 1, 3), layers=(32, 64), megabytes=(100, 250))
def activations_under_1f1b(p: int, rank: int, layers: int, megabytes: int) -> Card:
    return Card(
        f"1F1B with {p} stages and 32 microbatches; {layers} layers, each of which keeps {megabytes} MB for a "
        f"microbatch. How many GB does rank {rank} (from 0) hold at most?",
        live_chunks("1f1b", rank, p, 32) * layers / p * megabytes / 1e3,
        "GB",
        (
            "rank r has p - r microbatches alive, each in L/p layers",
            f"({p} - {rank}) * {layers}/{p} * {megabytes} / 1e3",
        ),
    )


@problem("07", tokens=(2048, 8192, 32768), width=(4096, 8192))
def input_gradients_against_weight_gradients(tokens: int, width: int) -> Card:
    return Card(
        f"A layer of width h = {width} with 12 h^2 weights; sequences of {tokens} tokens, attention counted "
        "without a mask. How many times as many operations does its input gradient take as its weight "
        "gradient?",
        (24 * width + 8 * tokens) / (24 * width),
        "times",
        (
            "a token: I takes 24 h^2 + 8 s h, for scores have two inputs and no weights; W takes 24 h^2",
            f"1 + {tokens} / (3 * {width})",
        ),
    )


@problem("07", p=(4, 8), forward=(10, 12), input_gradient=(11, 14), weight_gradient=(7, 9))
def idle_time_of_zb_h1(p: int, forward: int, input_gradient: int, weight_gradient: int) -> Card:
    return Card(
        f"ZB-H1 on {p} ranks with many microbatches: a forward takes {forward} ms, an input gradient "
        f"{input_gradient} ms and a weight gradient {weight_gradient} ms; messages take no time. How many ms "
        "does a rank idle in a step?",
        idle_s("zb-h1", p, forward, input_gradient, weight_gradient),
        "ms",
        (
            "1F1B idles (p-1)(F + I + W); weight gradients fill 2 (p-1) W of it",
            "what is left is (p-1)(F + I - W)",
            f"{p - 1} * ({forward} + {input_gradient} - {weight_gradient})",
        ),
    )


@problem("07", p=(4, 8, 16), gigabytes=(1.5, 2, 4))
def memory_for_no_bubble(p: int, gigabytes: float) -> Card:
    return Card(
        f"A microbatch's activations take {gigabytes:g} GB on each of {p} stages; there are many microbatches. "
        "How many GB more than under 1F1B does rank 0 hold under ZB-H2, which has no bubble if F = I = W?",
        (live_chunks("zb-h2", 0, p, 100) - live_chunks("1f1b", 0, p, 100)) * gigabytes,
        "GB",
        (
            "ZB-H2 starts 2p - 1 microbatches before its first backward, 1F1B p",
            f"(2 * {p} - 1 - {p}) * {gigabytes:g}",
        ),
    )


@problem("23", p=(4, 8, 16), m=(2, 4), percent=(10, 20, 50))
def slices_for_a_bubble(p: int, m: int, percent: int) -> Card:
    return Card(
        f"1F1B over slices of equal cost: {p} pipeline ranks, but only {m} long samples, one a microbatch. Into how many "
        f"slices must each be cut at least for a bubble of at most {percent} % of the ideal time?",
        ceil((p - 1) * 100 / (m * percent)),
        "slices",
        (
            "(p-1)/(m s) is at most the part, so s >= (p-1)/(m part), rounded up",
            f"ceil({p - 1} * 100 / ({m} * {percent}))",
        ),
        0.0,
    )


@problem("23", p=(4, 8, 16), slices=(2, 4, 8), gigabytes=(6, 12))
def memory_under_slices(p: int, slices: int, gigabytes: int) -> Card:
    return Card(
        f"Seq1F1B with {p} stages and many samples, each cut into {slices} equal slices. One whole sample's activations "
        f"take {gigabytes} GB on a stage. How many GB does rank 0 hold at most?",
        (p + slices - 1) / slices * gigabytes,
        "GB",
        (
            "p + s - 1 slices are alive: 1F1B's p, and s - 1 more, for a sample's backward begins with its last slice",
            f"({p} + {slices} - 1) / {slices} * {gigabytes}",
        ),
    )


@problem("23", p=(4, 8), rounds=(1, 2, 4), forward=(10, 15))
def idle_time_of_chimera(p: int, rounds: int, forward: int) -> Card:
    m = p * rounds
    return Card(
        f"Chimera on {p} ranks with {m} microbatches, {rounds} for each rank, half from each end. A forward takes "
        f"{forward} ms, a backward {2 * forward} ms; messages take no time. It idles p - 2 forwards a step, and as long "
        "again for every p microbatches. How many ms does a rank idle?",
        (p - 2) * (1 + rounds) * forward,
        "ms",
        ("(p-2)(1 + m/p) F", f"({p} - 2) * (1 + {m}/{p}) * {forward}"),
    )
