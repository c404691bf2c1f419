"""Hand-written collectives against gloo's own: in place, on the same memory, in the same processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Row, Times, on_cuda, race, row, run, seconds_a_call, worlds
from minipar.comm import Comm
from minipar.comm.transport.native_calls import all_gather_single, reduce_scatter_single

KB, MB = 1 << 10, 1 << 20
SIZES = [4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB]
LARGE = [256 * MB, 1 << 30]  # on GPUs


def rows(quick: bool = False) -> list[Row]:
    """Race all-reduces by size on 2 and 4 ranks, and the other collectives at 4 MB."""
    sizes = [4 * KB, 256 * KB, 4 * MB] if quick else SIZES + (LARGE if on_cuda() else [])
    return [row_ for p in worlds() for row_ in [*_all_reduce(p, sizes, quick), *_others(p, quick)]]


def _all_reduce(p: int, sizes: list[int], quick: bool) -> Iterator[Row]:
    for num_bytes, times in zip(sizes, zip(*run(_race_all_reduce, sizes, quick, world_size=p))):
        name = f"all_reduce_ {_size(num_bytes)}, {p} ranks"
        yield with_bus_bandwidth(row(name, times, _bar()), p, num_bytes)


def with_bus_bandwidth(r: Row, p: int, num_bytes: int) -> Row:
    """Add both sides' bus bandwidth, as in nccl-tests, to the note: 2(p-1)/p of the vector's bytes divided by the time."""
    sent = 2 * (p - 1) / p * num_bytes
    ours, theirs = (sent / seconds / 1e9 for seconds in (r.ours_s, r.theirs_s))
    return r._replace(note=f"{r.note}  bus {ours:.2f} GB/s against {theirs:.2f}")


def _bar() -> float | None:
    """Return the largest ratio allowed: on CPUs, gloo's time; on GPUs there is none, since NCCL's kernels are not ours."""
    return None if on_cuda() else 1.0


def _race_all_reduce(world: Comm, sizes: list[int], quick: bool) -> list[Times]:
    group, results = world.process_group(), []
    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 4, device=world.device)
        theirs = partial(dist.all_reduce, x, group=group)
        results.append(race(world, partial(world.all_reduce_, x), theirs, *_effort(num_bytes, quick)))
    return results


def _others(p: int, quick: bool) -> Iterator[Row]:
    for name, times in zip(OTHERS, zip(*run(_race_others, quick, world_size=p))):
        yield row(f"{name} 4 MB, {p} ranks", times, _bar())


OTHERS = ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


def _race_others(world: Comm, quick: bool) -> list[Times]:
    group, p = world.process_group(), world.size
    x, part, y = (
        torch.zeros(MB, device=world.device),
        torch.zeros(MB // p, device=world.device),
        torch.zeros(MB, device=world.device),
    )
    contenders = {
        "reduce_scatter": (
            partial(world.reduce_scatter, x, out=part),
            partial(reduce_scatter_single, part, x),
        ),
        "all_gather": (partial(world.all_gather, part, out=x), partial(all_gather_single, x, part)),
        "all_to_all": (partial(world.all_to_all, x), partial(dist.all_to_all_single, y, x)),
        "broadcast": (partial(world.broadcast, x, out=x), partial(dist.broadcast, x, 0)),
        "reduce": (partial(world.reduce, x), partial(dist.reduce, x, 0)),
    }
    effort = _effort(4 * MB, quick)
    return [race(world, ours, partial(theirs, group=group), *effort) for ours, theirs in contenders.values()]


def _effort(num_bytes: int, quick: bool) -> tuple[int, int]:
    """Return (rounds, calls per round), more of both for small messages."""
    rounds = 31 if num_bytes <= MB else 15
    return (rounds // 4 if quick else rounds), max(1, min(20, MB // num_bytes))


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


# Times over sizes, and their cost model ----------------------------------------------------------------------------


def measure(
    world_size: int, algorithm: str, sizes: Iterable[int], rounds: int = 9, collective: str = "all_reduce"
) -> dict[int, float]:
    """Time a collective at each size; return num_bytes -> seconds, the median over rounds of the slowest rank's time."""
    by_rank = run(_measure, collective, algorithm, list(sizes), rounds, world_size=world_size)
    return {n: statistics.median(map(max, zip(*times))) for n, times in zip(sizes, zip(*by_rank))}


def _measure(
    world: Comm, collective: str, algorithm: str, sizes: list[int], rounds: int
) -> list[list[float]]:
    out = []
    for num_bytes in sizes:
        call = partial(
            getattr(world, collective), torch.zeros(num_bytes // 4, device=world.device), algorithm=algorithm
        )
        call()
        out.append([seconds_a_call(world, call, _effort(num_bytes, False)[1]) for _ in range(rounds)])
    return out


def line(seconds: dict[int, float]) -> tuple[float, float]:
    """Fit time over size by least squares of relative errors: (intercept in seconds, slope in seconds per byte).

    The intercept divided by an algorithm's number of steps is alpha of its cost formula, the slope divided by its share
    of the bytes is beta.
    """
    n, t = np.array(list(seconds.items()), dtype=float).T
    (alpha_s, beta_s), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones_like(t), rcond=None)
    return float(alpha_s), float(beta_s)
