"""Measure this machine for `minipar plan`; `minipar calibrate` writes the result to a machine file.

One rank per CPU core measures, all ranks at the same time, because they share caches and memory. They measure matrix
products of several sizes, a copy, the attention kernel, a small model's forward and backward, and every collective with a
small and a large vector. Each time is the median of ROUNDS rounds, and a round takes as long as its slowest rank.

The cost model assumes that matrix products run at the median of the measured rates, and that all arithmetic reaches only
the fraction `share` of these rates. `share` is measured on the small model, which spends the rest of its time on operations
that the cost model does not count. The time of a collective of n bytes is a multiple of alpha (seconds per message) plus a
multiple of n beta (beta: seconds per byte), so measurements at two sizes n determine both.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.collectives import sent_share
from minipar.cost.machines import COLLECTIVES, Machine
from minipar.cost.work import head_seconds, layer_seconds
from minipar.model import Transformer
from minipar.model.flash import flash_attention
from minipar.runtime.launch import run
from minipar.train.planned import job_and_layout

SIZES = (128, 256, 512, 1024)  # n of the n x n matrices
SMALL_BYTES, LARGE_BYTES = 2**10, 2**23
ROUNDS = 9
TRIES = 3
ATTENTION = (4, 8, 256, 64)  # samples, heads, tokens, head_dim
SMALL = TrainConfig(
    model=ModelConfig(dim=192, num_layers=2, num_heads=6, max_seq_len=192), batch_size=4, seq_len=192
)


def calibrate(path: Path, ranks: int | None = None, on_progress: Callable[[str], None] = print) -> Machine:
    """Measure this machine, write the machine file `path`, and return the machine.

    ranks        number of ranks that measure at the same time; None: one per CPU core, at least 2
    on_progress  called with a line for each result
    """
    ranks = max(2, os.cpu_count() or 2) if ranks is None else ranks
    rates = {n: 2 * n**3 / _slowest(ranks, matmul_s, n) for n in SIZES}
    for n, rate in rates.items():
        on_progress(f"product of {n} x {n}: {rate / 1e9:.1f} GFLOP/s a rank")
    peak, usual = max(rates.values()), statistics.median(rates.values())
    copied = 2 * LARGE_BYTES * 4 / _slowest(ranks, copy_s, LARGE_BYTES)
    on_progress(f"copy: {copied / 1e9:.1f} GB/s a rank, reading and writing")
    b, h, t, d = ATTENTION
    attention = min(1.0, 2 * b * h * t * t * d / _slowest(ranks, attention_s, ATTENTION) / peak)
    on_progress(f"attention kernel: {attention:.0%} of the best product")

    def machine(share: float, pairs: dict[str, tuple[float, float]] | None) -> Machine:
        link = 1.0 if pairs is None else 1 / max(pairs["send"][1], 1e-12)
        return Machine(
            path.stem, peak, usual / peak, _memory_bytes() / ranks, copied, ranks, link, 1, link,
            attention_fraction=attention, share=share, float32_slowdown=1.0, context_bytes=3e8, collectives=pairs,
            source=f"measured on {ranks} ranks, gloo, float32",
        )  # fmt: skip

    share = min(1.0, small_model_s(machine(1.0, None)) / _slowest(ranks, model_s, SMALL))
    on_progress(f"a small model's forward and backward: {share:.0%} of these rates")
    pairs = {}
    for kind in COLLECTIVES:
        alpha, beta = measured_pair(kind, ranks)
        pairs[kind] = alpha, beta
        on_progress(f"{kind}: {1e6 * alpha:.0f} us a message, {1e9 * beta:.2f} ns a byte")
    measured = machine(share, pairs)
    write_machine(path, measured, rates)
    return measured


def small_model_s(machine: Machine) -> float:
    """Return the time, in seconds, that the cost model predicts for a forward and a backward of SMALL."""
    job, layout = job_and_layout(SMALL, machine)
    tokens = layout.tokens(job)
    layers = SMALL.model.num_layers * layer_seconds(job, tokens, 1, experts=False).total
    return layers + head_seconds(job, tokens, 1).total


def write_machine(path: Path, machine: Machine, rates: dict[int, float] | None = None) -> None:
    """Write a machine as the TOML file that `--machine` reads, with the rate of each matrix size in a comment."""
    lines = [f"# product of {n} x {n}: {rate:.4g} FLOP/s" for n, rate in (rates or {}).items()]
    for name in (f.name for f in fields(Machine) if f.name != "collectives"):
        lines.append(f"{name} = {json.dumps(getattr(machine, name))}")
    if machine.collectives is not None:
        lines += ["", "[collectives]  # seconds per message, seconds per byte"]
        lines += [f"{kind} = [{alpha!r}, {beta!r}]" for kind, (alpha, beta) in machine.collectives.items()]
    path.write_text("\n".join(lines) + "\n")


def measured_pair(kind: str, ranks: int) -> tuple[float, float]:
    """Measure (alpha, beta) of a collective, or of a message to the next rank if `kind` is "send".

    Measures again where bytes seem to take no time. Raises ValueError if they still do after TRIES measurements.
    """
    for _ in range(TRIES):
        small, large = (_slowest(ranks, collective_s, kind, n) for n in (SMALL_BYTES, LARGE_BYTES))
        alpha, beta = fit_pair(kind, ranks, (SMALL_BYTES, small), (LARGE_BYTES, large))
        if beta > 0:
            return alpha, beta
    raise ValueError(
        f"{kind} of {LARGE_BYTES} bytes took no longer than of {SMALL_BYTES}, {TRIES} times; nothing was written. Try "
        f"again when the machine is less busy, or use fewer than {ranks} ranks"
    )


def fit_pair(
    kind: str, ranks: int, small: tuple[float, float], large: tuple[float, float]
) -> tuple[float, float]:
    """Return the (alpha, beta), each at least 0, that explain two measurements (bytes, seconds) of a collective."""
    share = 1.0 if kind == "send" else sent_share(kind, ranks)
    rounds = 1 if kind == "send" else (ranks - 1) * (2 if kind == "all_reduce" else 1)
    beta = max(0.0, (large[1] - small[1]) / (share * (large[0] - small[0])))
    return max(0.0, small[1] - share * small[0] * beta) / rounds, beta


# On a rank ------------------------------------------------------------------------------------------------------------


def matmul_s(world: Comm, n: int) -> list[float]:
    """Time a float32 product of n x n matrices; return the seconds of each round."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    calls = max(1, 2**24 // n**2 // 16)
    return [seconds / calls for seconds in _rounds(world, lambda: [a @ b for _ in range(calls)])]


def copy_s(world: Comm, elems: int) -> list[float]:
    """Time a copy of `elems` float32 elements; return the seconds of each round."""
    source, target = torch.randn(elems), torch.empty(elems)
    return _rounds(world, lambda: target.copy_(source))


def attention_s(world: Comm, sizes: Sequence[int]) -> list[float]:
    """Time a forward of causal attention; return the seconds of each round."""
    q, k, v = (torch.randn(*sizes) for _ in range(3))
    return _rounds(world, lambda: flash_attention(q, k, v, impl="auto"))


def model_s(world: Comm, config: TrainConfig) -> list[float]:
    """Time a forward and a backward of the model; return the seconds of each round."""
    model = Transformer(config.model)
    tokens = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    return _rounds(world, lambda: model.loss(tokens, tokens).backward())


def collective_s(world: Comm, kind: str, num_bytes: int) -> list[float]:
    """Time a collective whose unsharded vector has `num_bytes`; return the seconds of each round."""
    whole = torch.zeros(num_bytes // 4 // world.size * world.size)
    part = whole[: len(whole) // world.size]
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    call = {
        "all_reduce": lambda: world.all_reduce(whole),
        "reduce_scatter": lambda: world.reduce_scatter(whole),
        "all_gather": lambda: world.all_gather(part),
        "all_to_all": lambda: world.all_to_all(whole),
        "send": lambda: world.exchange(whole, right, whole.shape, whole.dtype, left),
    }[kind]
    return _rounds(world, call)


def _rounds(world: Comm, function: Callable[[], object]) -> list[float]:
    function()
    seconds = []
    for _ in range(ROUNDS):
        world.barrier()
        start_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def _slowest(ranks: int, function: Callable[..., list[float]], *args: Any) -> float:
    found = run(function, *args, world_size=ranks)
    return statistics.median([float(max(of_round)) for of_round in zip(*found)])


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
