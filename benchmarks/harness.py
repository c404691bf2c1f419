"""Races of ours against theirs, timed in turn in the same processes, so that a busy machine slows both. On CPUs or GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

import minipar
from minipar.comm import Comm
from minipar.runtime.devices import Machine, why_not_nccl

Step = Callable[[], object]
Times = list[tuple[float, float]]  # (ours, theirs) in each round
DEVICES = ("cpu", "cuda")
_device: ContextVar[str] = ContextVar("device", default="cpu")  # set by `benchmarks.run` alone


class Row(NamedTuple):
    """One line of a table. `ratio` is our time / their time, below 1 if ours is faster; `bar` is the largest allowed."""

    name: str
    ours_s: float
    theirs_s: float
    ratio: float
    bar: float | None = None
    note: str = ""


def on_cuda() -> bool:
    return _device.get() == "cuda"


def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `minipar.run` with this benchmark's device."""
    return minipar.run(function, *args, backend="nccl" if on_cuda() else "gloo", **options)


def worlds() -> list[int]:
    """Return the numbers of ranks to measure on: 2 and 4; with NCCL, also 8, but at most as many ranks as it can serve."""
    if not on_cuda():
        return [2, 4]
    machine = Machine.here()
    return [ranks for ranks in (2, 4, 8) if why_not_nccl(ranks, machine) is None]


def race(world: Comm, ours: Step, theirs: Step, rounds: int, calls: int = 1) -> Times:
    """Time both functions; return this rank's seconds per call of (ours, theirs) in each round.

    An untimed call of each comes first. All ranks start together. The order alternates, since a rank that was preempted in
    one function is late for the next.
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


def seconds_a_call(world: Comm, function: Step, calls: int = 1) -> float:
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        function()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)  # before this, the calls are only enqueued
    return (time.perf_counter() - start_s) / calls


def row(name: str, times_by_rank: Iterable[Times], bar: float | None = None, note: str = "") -> Row:
    """Make a line of the table from what `race` returned on every rank; the slowest rank's time is the round's time.

    The ratio is the median of the rounds' ratios; the note begins with the quartiles.
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
