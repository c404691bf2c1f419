"""Ours against theirs: timed in turn, in the same processes, so that a busy machine slows both. On CPUs, or on GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NamedTuple

import torch

import minipar
from minipar.runtime.devices import Machine, why_not_nccl

DEVICES = ("cpu", "cuda")
_device: ContextVar[str] = ContextVar("device", default="cpu")  # set by `benchmarks.run` alone


class Row(NamedTuple):
    """One line of a table. `ratio` is ours / theirs, so below 1 ours is faster; `bar` is the largest ratio allowed."""

    name: str
    ours_s: float
    theirs_s: float
    ratio: float
    bar: float | None = None
    note: str = ""


def on_cuda() -> bool:
    return _device.get() == "cuda"


def run(function: Callable, *args, **options) -> list:
    """`minipar.run` on ranks with the device of this benchmark."""
    return minipar.run(function, *args, backend="nccl" if on_cuda() else "gloo", **options)


def worlds() -> list[int]:
    """The numbers of ranks to measure on: 2 and 4, on GPUs also 8, as far as NCCL can serve them here."""
    if not on_cuda():
        return [2, 4]
    machine = Machine.here()
    return [ranks for ranks in (2, 4, 8) if why_not_nccl(ranks, machine) is None]


def race(world, ours: Callable, theirs: Callable, rounds: int, calls: int = 1) -> list[tuple[float, float]]:
    """Time both functions: this rank's seconds per call of (ours, theirs) in each round, after one untimed call of each.

    All ranks start together. The order alternates, since a rank that was preempted in one is late for the next.
    """
    contenders = (ours, theirs)
    for function in contenders:
        function()
    times = []
    for i in range(rounds):
        seconds = {}
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            seconds[which] = seconds_a_call(world, contenders[which], calls)
        times.append((seconds[0], seconds[1]))
    return times


def seconds_a_call(world, function: Callable, calls: int = 1) -> float:
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        function()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)  # until here the calls are only enqueued
    return (time.perf_counter() - start_s) / calls


def row(name: str, times_by_rank, bar: float | None = None, note: str = "") -> Row:
    """Make a line of the table from what `race` returned on every rank: a round takes as long as on its slowest rank.

    The ratio is the median of the rounds' ratios; the note begins with their quartiles.
    """
    rounds = [tuple(map(max, zip(*ranks))) for ranks in zip(*times_by_rank)]
    ratios = sorted(ours / theirs for ours, theirs in rounds)
    quarter = len(ratios) // 4
    spread = f"{ratios[quarter]:.2f}..{ratios[-1 - quarter]:.2f}"
    ours_s, theirs_s = (statistics.median(side) for side in zip(*rounds))
    return Row(name, ours_s, theirs_s, statistics.median(ratios), bar, f"{spread}  {note}".rstrip())


def print_table(title: str, rows: Iterable[Row]) -> None:
    print(f"\n{title}\n{'':34}{'ours':>11}{'theirs':>11}{'ratio':>8}{'bar':>7}")
    for r in rows:
        bar = "" if r.bar is None else f"{r.bar:.2f}"
        over = "over" if r.bar is not None and r.ratio > r.bar else ""
        times = f"{1e3 * r.ours_s:8.2f} ms{1e3 * r.theirs_s:8.2f} ms"
        print(f"{r.name:34}{times}{r.ratio:8.2f}{bar:>7} {over:5}{r.note}", flush=True)
