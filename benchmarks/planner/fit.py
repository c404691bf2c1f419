"""Fit the cost model's few free numbers to half of the published runs, and compare it with the other half.

    python -m benchmarks.planner.fit                     prints the fitted numbers and those in use
    python -m benchmarks.planner.fit docs/generated      also writes planner.md there, and its picture

A program is the training software of a run. `arithmetic` of an unknown program is fitted to the dense runs of all programs
with FEW or more of them, each program with the same weight, by the least mean error without sign: programs that are much
slower or faster than most then count little. A program has numbers of its own, NUMBERS, only if they bring its held-out
runs nearer; they are fitted by least squares of log(predicted time / measured time).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from benchmarks.planner.nccl_curves import fitted_fill
from benchmarks.planner.published_runs import MIXTURE, TABLES, Run, published_runs
from minipar.cost import doubt, timing, work
from minipar.cost.layout import Implementation
from minipar.cost.links import FILL
from minipar.cost.programs import PROGRAMS

TENTHS = tuple(n / 10 for n in range(11))
# Programs with numbers of their own: `arithmetic`, and what else is tried.
NUMBERS: dict[str, tuple[float, ...]] = {  # program -> values of attention_speed
    "megatron-2021": (1.0,),
    "composer": TENTHS[3:],
    "torchtitan-eager": (1.0,),
    "kempnerforge": (1.0,),
}
SPREAD_ROWS = (0, 250, 500, 750, 1000, 1250, 1500, 1750, 2000)
FEW = 2
UNEXPLAINED = (
    "deepspeed-2021",
    "kempnerforge-eager",
)  # whose time no formula explains: nothing is fitted to them


def program_of(run: Run) -> str:
    return TABLES[run.table].program


def runs_of(program: str, held_out: bool | None = None) -> list[Run]:
    """Return the published runs of a training program: those held out, those fitted, or all (None)."""
    found = [run for run in published_runs() if program_of(run) == program]
    return [run for run in found if held_out is None or run.held_out == held_out]


def dense(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.kind != MIXTURE]


def mixtures(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.kind == MIXTURE]


def mean_error(runs: Iterable[Run], error: Callable[[Run], float]) -> float:
    """Return the mean of the relative errors, without sign."""
    return fmean(abs(math.expm1(error(run))) for run in runs)


def unknown(run: Run, **numbers: float) -> Implementation:
    """Return the behaviour of a run's program, such as what it overlaps, with the numbers of an unknown program."""
    default = Implementation()
    numbers = dict(arithmetic=default.arithmetic, attention_speed=default.attention_speed) | numbers
    return replace(PROGRAMS[program_of(run)].implementation, **numbers)  # type: ignore[arg-type]


def unknown_error(run: Run) -> float:
    return run.error(unknown(run))


def fitted_default(without: str = "") -> float:
    """Return the `arithmetic` of a program that is not known, fitted to all programs but one."""
    names = [name for name in PROGRAMS if name not in (without, *UNEXPLAINED)]
    groups = [dense(runs_of(name, held_out=False)) for name in names]
    arithmetic = 1.0
    for _ in range(4):
        errors = [
            (run.error(unknown(run, arithmetic=arithmetic)), 1 / len(runs))
            for runs in groups
            if len(runs) >= FEW
            for run in runs
        ]
        arithmetic *= math.exp(-weighted_quantile(errors, 0.5))
    return arithmetic


def fitted_program(program: str) -> Implementation:
    """Return the implementation of a program of NUMBERS, fitted to those of its dense runs that are not held out."""
    runs, base = dense(runs_of(program, held_out=False)), PROGRAMS[program].implementation
    found = [centred(runs, replace(base, attention_speed=speed)) for speed in NUMBERS[program]]
    return min(found, key=lambda how: fmean(run.error(how) ** 2 for run in runs))


def centred(runs: Sequence[Run], how: Implementation) -> Implementation:
    """Return `how` with `arithmetic` set so that the mean error of the runs is 0."""
    for _ in range(4):
        how = replace(how, arithmetic=how.arithmetic * math.exp(-fmean(run.error(how) for run in runs)))
    return how


def weighted_quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """Return the smallest value up to which `share` of the weight of (value, weight) pairs lies."""
    pairs = sorted(values)
    least, reached = share * sum(weight for _, weight in pairs), 0.0
    for value, weight in pairs:
        reached += weight
        if reached >= least:
            return value
    raise AssertionError("no values")


@contextmanager
def changed(module: Any, name: str, value: Any) -> Any:
    """Replace a number or a term of the model. What was computed before is forgotten, here and afterwards."""
    with patch.object(module, name, value):
        forget()
        yield
    forget()


def forget() -> None:
    """Forget the cached times of layers."""
    for module in (timing, work):
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()


def fitted_rows() -> int:
    """Return the SLOW_ROWS with the least squared error on the fitted mixtures."""
    runs = [
        run for run in mixtures(published_runs()) if not run.held_out and program_of(run) not in UNEXPLAINED
    ]

    def squares(rows: int) -> float:
        with changed(work, "SLOW_ROWS", rows):
            return fmean(run.error() ** 2 for run in runs)

    return min(SPREAD_ROWS, key=squares)


def fitted_hidden() -> float:
    """Return the HIDDEN_ZERO3 with the least squared error of composer's runs, the only ones on 8 to 512 GPUs."""
    runs = runs_of("composer", held_out=False)

    def squares(hidden: float) -> float:
        with changed(timing, "HIDDEN_ZERO3", hidden):
            how = centred(runs, PROGRAMS["composer"].implementation)
            return fmean(run.error(how) ** 2 for run in runs)

    return min(TENTHS[:8], key=squares)


# Doubt -------------------------------------------------------------------------------------------------------------------


def strangers_errors() -> list[tuple[Run, float]]:
    """Return the error of each run without sign, predicted by numbers that were fitted to other programs alone."""
    default = {program: fitted_default(without=program) for program in PROGRAMS}
    return [
        (run, math.expm1(abs(run.error(unknown(run, arithmetic=default[program_of(run)])))))
        for run in published_runs()
    ]


def covered(errors: Sequence[tuple[Run, float]]) -> float:
    """Return the share of these runs whose error is at most the doubt that `minipar plan` prints."""
    return fmean(error <= doubt.doubt(run.job(), run.layout) for run, error in errors)


def pair_errors() -> list[float]:
    """Return by how much the predicted ratio of two times errs, without sign, for held-out runs of one model and table."""
    held = [run for run in dense(published_runs()) if run.held_out]
    return [
        abs(math.expm1(a.error() - b.error()))
        for i, a in enumerate(held)
        for b in held[:i]
        if (a.table, a.model) == (b.table, b.model)
    ]


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


def ranking(error: Callable[[Run], float] = lambda run: run.error()) -> dict[str, float]:
    """Return Spearman's correlation of predicted and measured MFU within each table of five runs or more."""
    found = {}
    for table in TABLES:
        runs = [run for run in published_runs() if run.table == table]
        if len(runs) >= 5:
            mfu = [run.mfu for run in runs]
            found[table] = spearman(mfu, [m * math.exp(-error(run)) for m, run in zip(mfu, runs)])
    return found


def main(argv: Sequence[str]) -> None:
    """Print the fitted numbers and those in use; write the page and its picture to each folder of `argv`."""
    from benchmarks.planner.planner_page import page, scatter  # which show what this module fits
    from minipar.visualize.style import write

    print(f"collectives     fill {fitted_fill()} (in use {FILL})")
    print(f"minipar         arithmetic {fitted_default():.3f} (in use {Implementation().arithmetic})")
    for name in NUMBERS:
        found, used = fitted_program(name), PROGRAMS[name].implementation
        for field in ("arithmetic", "attention_speed"):
            print(f"{name:15} {field} {getattr(found, field):.3g} (in use {getattr(used, field)})")
    print(f"ZeRO-3 hides    {fitted_hidden()} (in use {timing.HIDDEN_ZERO3})")
    print(f"rows            {fitted_rows()} (in use {work.SLOW_ROWS})")
    for folder in argv:
        (Path(folder) / "planner.md").write_text(page(), encoding="utf-8")
        write(scatter(), Path(folder) / "planner.png")
        print(f"wrote {folder}/planner.md and planner.png")


if __name__ == "__main__":
    main(sys.argv[1:])
