"""Fit the cost model's free parameters to half of the published runs, and compare it with the other half.

    python -m benchmarks.planner.fit                     prints the fitted parameters and those in use
    python -m benchmarks.planner.fit docs/generated/planner.md     also writes the page of all runs

A program is the training software of a run. Fitted are `arithmetic` and, for programs with many runs, one or two parameters
of FREE, by least squares of log(predicted time / measured time). A program with fewer than FEW runs in the fitted half
keeps minipar's default parameters. The defaults are fitted to the dense runs of all programs with as many, each program
with the same weight, by the least mean error without sign: programs that are much slower or faster than most then count
little.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planner.nccl_curves import fitted_fill
from benchmarks.planner.published_runs import TABLES, Run, published_runs, spread
from minipar.cost.doubt import MIXTURE, spread_key
from minipar.cost.layout import Implementation
from minipar.cost.links import FILL
from minipar.cost.programs import PROGRAMS

TENTHS = tuple(n / 10 for n in range(11))
FREE: dict[str, dict[str, Sequence[float]]] = {
    "composer": {"overlap": TENTHS[:8], "attention_speed": TENTHS[3:]},
    "deepspeed-2021": {"gathers_per_layer": (12, 16, 20, 24, 28, 32)},
    "megatron-core": {"overlap": TENTHS, "expert_overlap": TENTHS},
    "kempnerforge": {"overlap": TENTHS},
}
FITTED = ("arithmetic", "overlap", "zero3_overlap", "gathers_per_layer", "attention_speed", "expert_overlap")
# What `minipar plan` assumes of a program that it does not know: the default numbers, and that messages are contiguous.
ASSUMED = (*FITTED, "joins_tokens")
FEW = 2
ENOUGH = 4  # held-out runs for an interval of their own: the fewest that tell where 80 % of all lie
SCALED = "composer"


def runs_of(program: str, held_out: bool | None = None) -> list[Run]:
    """Return the published runs of a training program: those held out, those fitted, or all (None)."""
    found = [run for run in published_runs() if TABLES[run.table].program == program]
    return [run for run in found if held_out is None or run.held_out == held_out]


def fitted_runs(program: str) -> list[Run]:
    """Return the runs that a program's parameters are fitted to: dense ones, or mixtures if it has no others."""
    runs = runs_of(program, held_out=False)
    return [run for run in runs if run.kind != MIXTURE] or runs


def fitted_program(program: str) -> Implementation:
    """Return a program's implementation, with its parameters fitted to those of its runs that are not held out.

    A program with dense runs is fitted to these alone; its mixtures are then a check.
    """
    runs, free = fitted_runs(program), FREE.get(program, {})
    base = PROGRAMS[program].implementation
    candidates = [centred([runs], _with(base, dict(zip(free, values)))) for values in product(*free.values())]
    return min(candidates, key=lambda how: fmean(run.error(how) ** 2 for run in runs))


def fitted_default() -> tuple[float, float]:
    """Return the default (arithmetic, overlap).

    The overlap is that of SCALED, the only program with runs on 8 to 512 GPUs. `arithmetic` is fitted to the programs with
    FEW dense runs or more.
    """
    fitted_halves = (fitted_runs(name) for name in PROGRAMS)
    groups = [runs for runs in fitted_halves if len(runs) >= FEW and runs[0].kind != MIXTURE]
    overlap = fitted_program(SCALED).overlap
    return centred(groups, Implementation(overlap=overlap)).arithmetic, overlap


def unknown_error(run: Run, default: Implementation) -> float:
    """Predict a run with its program's options, but with ASSUMED taken from `default`; return the error.

    Options are, for example, which messages the program overlaps, and when it reduces gradients.
    """
    table = TABLES[run.table]
    numbers = {name: getattr(default, name) for name in ASSUMED}
    return run.error(_with(PROGRAMS[table.program].implementation, numbers))


def _with(how: Implementation, numbers: dict[str, Any]) -> Implementation:
    return replace(how, **numbers)


def centred(groups: Sequence[Sequence[Run]], how: Implementation) -> Implementation:
    """Return `how` with `arithmetic` set so that the mean error of one group, or the weighted median of several, is 0."""
    for _ in range(4):
        if len(groups) == 1:
            mean = fmean(run.error(how) for run in groups[0])
        else:
            mean = weighted_median(
                [(unknown_error(run, how), 1 / len(runs)) for runs in groups for run in runs]
            )
        how = replace(how, arithmetic=how.arithmetic * math.exp(-mean))
    return how


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of (value, weight) pairs: the value at which half of the weight is reached."""
    half, reached = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("no values")


def held_out_spreads() -> dict[str, float]:
    """Return, by kind of layout, the relative error that 80 % of further runs stay within, with default parameters."""
    default, by_kind = Implementation(), dict[str, list[float]]()
    for run in published_runs():
        if run.held_out:
            by_kind.setdefault(run.kind, []).append(math.expm1(abs(unknown_error(run, default))))
    return {kind: spread(errors) for kind, errors in by_kind.items() if len(errors) >= ENOUGH}


def program_spreads() -> dict[str, float]:
    """Return the relative error that 80 % of a program's further runs stay within, with its own parameters.

    The key is the program's name, and "NAME, mixture" for its runs of mixtures.
    """
    found = dict[str, list[float]]()
    for name in PROGRAMS:
        for run in runs_of(name, held_out=True):
            key = spread_key(name, run.job().shape)
            found.setdefault(key, []).append(math.expm1(abs(run.error())))
    return {key: spread(errors) for key, errors in found.items() if len(errors) >= ENOUGH}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share a rank."""
    x, y = _ranks(a), _ranks(b)
    mean_x, mean_y = fmean(x), fmean(y)
    both = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y))
    return both / math.sqrt(sum((p - mean_x) ** 2 for p in x) * sum((q - mean_y) ** 2 for q in y))


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def main(argv: Sequence[str]) -> None:
    """Print the fitted parameters and those in use; write the page to each file of `argv`."""
    from benchmarks.planner.planner_page import page  # which shows what this module fits

    arithmetic, overlap = fitted_default()
    mine = Implementation()
    print(f"collectives     fill {fitted_fill()} (in use {FILL})")
    print(
        f"minipar         arithmetic {arithmetic:.3f} (in use {mine.arithmetic}), overlap {overlap} ({mine.overlap})"
    )
    for name in PROGRAMS:
        if len(fitted_runs(name)) >= FEW:
            found, used = fitted_program(name), PROGRAMS[name].implementation
            words = (
                f"{field} {getattr(found, field):.3g} (in use {getattr(used, field)})"
                for field in ("arithmetic", *FREE.get(name, ()))
            )
            print(f"{name:15} {', '.join(words)}")
    print(
        "80 % of further runs within", {kind: round(value, 3) for kind, value in held_out_spreads().items()}
    )
    print("by program", {name: round(value, 3) for name, value in program_spreads().items()})
    for path in argv:
        Path(path).write_text(page(), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
