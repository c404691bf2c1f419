"""Problems of lessons 00, 01 and 14: messages, rings, compressed gradients."""

from __future__ import annotations

from minipar.cost.collectives import collective_s, hierarchical_all_reduce_s, sent_share
from minipar.learn.exercises.problems.card import Card, problem

MICRO, GIGA = 1e-6, 1e9


@problem("00", latency=(2, 5, 10, 20), bandwidth=(10, 25, 50, 100))
def message_of_half_bandwidth(latency: int, bandwidth: int) -> Card:
    return Card(
        f"A message takes {latency} microseconds and, for each byte, the inverse of {bandwidth} GB/s. Of how "
        "many KB is a message that reaches half of the bandwidth?",
        latency * MICRO * bandwidth * GIGA / 1e3,
        "KB",
        ("half the time is latency: alpha = n/W, so n = alpha W", f"{latency}e-6 * {bandwidth}e9 / 1e3"),
    )


@problem("00", tensors=(50, 200, 400), kilobytes=(4, 16, 64), latency=(5, 10, 20), bandwidth=(10, 25))
def gain_of_one_bucket(tensors: int, kilobytes: int, latency: int, bandwidth: int) -> Card:
    def seconds(messages: int) -> float:
        return messages * latency * MICRO + tensors * kilobytes * 1e3 / (bandwidth * GIGA)

    return Card(
        f"{tensors} tensors of {kilobytes} KB go to a neighbour, one after the other: {latency} microseconds a "
        f"message and {bandwidth} GB/s. How many times longer does that take than one message with all of "
        "them?",
        seconds(tensors) / seconds(1),
        "times",
        (
            "k (alpha + n/W) over alpha + k n/W",
            f"{tensors} * ({latency}e-6 + {kilobytes}e3/{bandwidth}e9)"
            f" / ({latency}e-6 + {tensors} * {kilobytes}e3/{bandwidth}e9)",
        ),
    )


@problem("00", p=(8, 16, 64), megabytes=(10, 100, 500), bandwidth=(12.5, 25, 50))
def sum_on_one_rank(p: int, megabytes: int, bandwidth: float) -> Card:
    return Card(
        f"{p} ranks sum a vector of {megabytes} MB the naive way: all send it to rank 0, which adds, and sends "
        f"the sum back to each. Rank 0 receives, and then sends, {bandwidth:g} GB/s in all. How many ms does "
        "that take, without latency?",
        2 * (p - 1) * megabytes * 1e6 / (bandwidth * GIGA) * 1e3,
        "ms",
        (
            "p-1 vectors come in, and p-1 go out: 2 (p-1) n/W",
            f"2 * {p - 1} * {megabytes}e6 / {bandwidth:g}e9 * 1e3",
        ),
    )


@problem("01", p=(4, 8, 16, 64), latency=(5, 10, 20), bandwidth=(10, 25, 50, 100))
def ring_of_half_latency(p: int, latency: int, bandwidth: int) -> Card:
    num_bytes = p * latency * MICRO * bandwidth * GIGA
    return Card(
        f"A ring all-reduce over {p} ranks, {latency} microseconds a message, {bandwidth} GB/s. At how many MB "
        "does it spend half of its time on latency?",
        num_bytes / 1e6,
        "MB",
        (
            "latency 2(p-1) alpha, bytes 2(p-1)/p n/W",
            "they are equal at n = p alpha W",
            f"{p} * {latency}e-6 * {bandwidth}e9 / 1e6",
        ),
    )


@problem("01", nodes=(2, 4, 16), gigabytes=(1, 2, 10), inside=(200, 400), outside=(25, 50))
def all_reduce_over_nodes(nodes: int, gigabytes: int, inside: int, outside: int) -> Card:
    links = (0.0, 1e-9 / inside), (0.0, 1e-9 / outside)
    return Card(
        f"{nodes} nodes of 8 GPUs; {inside} GB/s between the GPUs of a node, {outside} GB/s out of the node "
        f"for each GPU; no latency. How many ms does an all-reduce of {gigabytes} GB take in three phases: "
        "inside nodes, across, inside?",
        hierarchical_all_reduce_s(nodes, 8, gigabytes * GIGA, *links) * 1e3,
        "ms",
        (
            "inside, reduce-scatter and all-gather: 2 (g-1)/g n/W",
            "across, an all-reduce of n/g: 2 (k-1)/k n/(g w)",
            f"(2 * 7/8 * {gigabytes}/{inside} + 2 * {nodes - 1}/{nodes} * {gigabytes}/8/{outside}) * 1e3",
        ),
    )


@problem("01", p=(4, 8, 32), gigabytes=(1, 4, 8), milliseconds=(20, 40, 50))
def bus_bandwidth(p: int, gigabytes: int, milliseconds: int) -> Card:
    return Card(
        f"An all-reduce of {gigabytes} GB over {p} ranks takes {milliseconds} ms. Which bus bandwidth does "
        "that make, in GB/s?",
        sent_share("all_reduce", p) * gigabytes / (milliseconds * 1e-3),
        "GB/s",
        (
            "bus bandwidth is what a ring's rank would send over the time: 2(p-1)/p n/t",
            f"2 * {p - 1}/{p} * {gigabytes} / {milliseconds}e-3",
        ),
    )


@problem("14", p=(8, 64), ratio=(4, 16, 100), bandwidth=(3, 12.5, 25))
def slowest_useful_codec(p: int, ratio: int, bandwidth: float) -> Card:
    saved_s_per_gb = collective_s("all_reduce", p, 1.0, 0.0, 1 / bandwidth) * (1 - 1 / ratio)
    return Card(
        f"A codec makes gradients {ratio} times shorter before a ring all-reduce over {p} ranks of "
        f"{bandwidth:g} GB/s. Nothing overlaps. How many GB of gradients must the codec process each second, "
        "at least, to gain time?",
        1 / saved_s_per_gb,
        "GB/s",
        (
            "saved: 2(p-1)/p (1 - 1/r) n/W; spent: n/G",
            "so G = W / (2(p-1)/p (1 - 1/r))",
            f"{bandwidth:g} / (2 * {p - 1}/{p} * (1 - 1/{ratio}))",
        ),
    )


@problem("14", rows=(1024, 4096, 8192), columns=(4096, 11008), rank=(1, 2, 4))
def bytes_of_powersgd(rows: int, columns: int, rank: int) -> Card:
    return Card(
        f"PowerSGD of rank {rank} sends a gradient of {rows} x {columns} as two thin matrices. How many times "
        "fewer elements are summed than without it?",
        rows * columns / (rank * (rows + columns)),
        "times",
        (
            "n m elements become r n + r m: n m / (r (n + m))",
            f"{rows} * {columns} / ({rank} * ({rows} + {columns}))",
        ),
    )


@problem("14", percent=(0.1, 0.5, 1, 2), value_bytes=(2, 4))
def ranks_at_which_top_k_loses(percent: float, value_bytes: int) -> Card:
    kept = percent / 100
    return Card(
        f"Top-k keeps {percent:g} % of a gradient's values, {value_bytes} bytes and an index of 4 bytes each, "
        "and all-gathers them: indices differ, so nothing is summed on the way. From how many ranks on does a "
        f"rank send at least as much as in a ring all-reduce of all values, {value_bytes} bytes each?",
        2 * value_bytes / ((value_bytes + 4) * kept),
        "ranks",
        (
            "gathered by a ring: (p-1) k (v+4) n; summed: 2(p-1)/p v n",
            "they are equal at p = 2 v / ((v+4) k)",
            f"2 * {value_bytes} / (({value_bytes} + 4) * {percent:g}/100)",
        ),
    )
