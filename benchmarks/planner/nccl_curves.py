"""Published times of NCCL's collectives by size of the message, and the cost model's error on them.

`nccl_curves.csv` has one point per line: its curve, the bytes of the whole vector, and microseconds. CURVES says for each
curve on which machine and how many GPUs it was measured, and the source. A curve is held out if the first byte of the
SHA-256 of its name is odd: the model's one fitted number, `links.FILL`, was not fitted to it.

Networks other than InfiniBand take longer for a hop than NCCL's constant of 14 us: OTHER_NETWORK_S fits the two curves
measured on such networks. Write it as `network_latency_s` into a machine file for a cluster behind EFA or Ethernet.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import NamedTuple

from minipar.cost import links as links_model
from minipar.cost.links import Links, collective_s, links_of
from minipar.cost.machines import MACHINES, Machine

OTHER_NETWORK_S = 80e-6
LEAST_BYTES = 1e6  # smaller messages are priced by NCCL's latencies alone, and cost no layout much
FILLS = tuple(n / 10 for n in range(11))


class Curve(NamedTuple):
    """A measured curve: its collective over `gpus` GPUs of consecutive nodes of a machine.

    fits  whether `links.FILL` may be fitted to it: no for networks whose latency was fitted to this very curve
    """

    machine: Machine
    gpus: int
    kind: str
    source: str
    fits: bool = True


_H100, _B200 = MACHINES["h100"], MACHINES["b200"]
_OPEN_BOOK = "Machine Learning Engineering Open Book 744d01e, network"
_PARK = "github.com/ZiyanIshani/vpbenchmarking, results/nccl: NCCL 2.24.3, 8 x 400 Gb/s InfiniBand"
CURVES = {
    "a100-8": Curve(MACHINES["a100-80gb"], 8, "all_reduce", f"{_OPEN_BOOK}, real network throughput"),
    "h100-8": Curve(_H100, 8, "all_reduce", _PARK),
    "h200-8": Curve(MACHINES["h200"], 8, "all_reduce", f"{_OPEN_BOOK}, real network throughput"),
    "b200-8": Curve(_B200, 8, "all_reduce", f"{_OPEN_BOOK}, inter-node speed"),
    "h100-16": Curve(_H100, 16, "all_reduce", "github.com/drmysore/nebius-h100-16gpu-benchmark: NCCL 2.20.5"),
    "h100-32": Curve(_H100, 32, "all_reduce", _PARK),
    "h100-32-gather": Curve(_H100, 32, "all_gather", _PARK),
    "b200-32-efa": Curve(
        replace(_B200, network_latency_s=OTHER_NETWORK_S), 32, "all_reduce", f"{_OPEN_BOOK}, inter-node speed", False
    ),
    "h100-16-gcp": Curve(
        replace(_H100, network_latency_s=OTHER_NETWORK_S, card_bytes_per_s=25e9), 16, "all_reduce",
        "github.com/lessizzmore/create-a3mega-ztan-fork: 8 x 200 Gb/s Ethernet", False,
    ),
}  # fmt: skip


class Point(NamedTuple):
    """The measured seconds of one message."""

    num_bytes: float
    seconds: float


@cache
def measured(name: str) -> tuple[Point, ...]:
    """Return the points of a curve with LEAST_BYTES or more."""
    text = (files(__package__) / "nccl_curves.csv").read_text(encoding="utf-8")
    rows = [row for row in csv.DictReader(text.splitlines()) if row["curve"] == name]
    points = [Point(float(row["bytes"]), 1e-6 * float(row["microseconds"])) for row in rows]
    return tuple(point for point in points if point.num_bytes >= LEAST_BYTES)


def held_out(name: str) -> bool:
    return bool(hashlib.sha256(name.encode()).digest()[0] % 2)


Model = Callable[[Machine, Links, str, float], float]


def errors(name: str, model: Model = collective_s) -> list[float]:
    """Return ln(predicted time / measured time) of each point."""
    curve = CURVES[name]
    links = links_of(curve.machine, curve.gpus, 1)
    predicted = [model(curve.machine, links, curve.kind, n) for n, _ in measured(name)]
    return [math.log(p / point.seconds) for p, point in zip(predicted, measured(name))]


def with_fill(fill: float) -> Model:
    """Return the model of collectives with another FILL; 0 adds latency and bytes."""

    def model(machine: Machine, links: Links, kind: str, num_bytes: float) -> float:
        latency_s, bytes_s = links_model.latency_and_bytes_s(machine, links, kind, num_bytes)
        return links_model.message_s(latency_s, bytes_s, fill)

    return model


def fitted_fill() -> float:
    """Return the FILL with the least mean error on the curves that are not held out."""
    names = [name for name, curve in CURVES.items() if curve.fits and not held_out(name)]
    return min(FILLS, key=lambda fill: fmean(_mean(errors(name, with_fill(fill))) for name in names))


def _mean(logs: Sequence[float]) -> float:
    return fmean(abs(math.expm1(error)) for error in logs)


def rows() -> list[str]:
    """Return a row of the table in docs/generated/planner.md for each curve."""
    found = []
    for name, curve in CURVES.items():
        kinds = _mean(errors(name, with_fill(0.0))), _mean(errors(name))
        used = "check" if held_out(name) else "fit" if curve.fits else "latency only"
        most = max(errors(name), key=abs)
        found.append(
            f"| {name} | {curve.kind.replace('_', '-')} | {len(measured(name))} | {kinds[0]:.0%} | {kinds[1]:.0%} | "
            f"{math.expm1(most):+.0%} | {used} | {curve.source} |"
        )
    return found
