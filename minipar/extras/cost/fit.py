"""Fit the cost model's free parameters to half of the published runs, and compare it with the other half.

    python -m minipar.extras.cost.fit                     prints the fitted parameters and those in use
    python -m minipar.extras.cost.fit docs/planner.md     also writes the page of all runs

A program is the training software of a run. Fitted are `arithmetic` and, for programs with many runs, one or two parameters
of FREE, by least squares of log(predicted time / measured time). A program with fewer than FEW runs in the fitted half
keeps minipar's default parameters. The defaults are fitted to the dense runs of all programs with as many, each program
with the same weight, by the least mean error without sign: programs that are much slower or faster than most then count
little.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from minipar.cost.doubt import MIXTURE, PROGRAM_SPREADS, SPREADS, spread_key
from minipar.cost.layout import Implementation
from minipar.cost.links import FILL
from minipar.cost.programs import PROGRAMS
from minipar.extras.cost.nccl_curves import LEAST_BYTES, OTHER_NETWORK_S, fitted_fill, rows
from minipar.extras.cost.published_runs import TABLES, Run, published_runs, spread

TENTHS = tuple(n / 10 for n in range(11))
FREE: dict[str, dict[str, Sequence[float]]] = {
    "composer": {"overlap": TENTHS[:8], "attention_speed": TENTHS[3:]},
    "deepspeed-2021": {"gathers_per_layer": (12, 16, 20, 24, 28, 32)},
    "megatron-core": {"overlap": TENTHS, "expert_overlap": TENTHS},
    "kempnerforge": {"overlap": TENTHS},
}
FITTED = ("arithmetic", "overlap", "gathers_per_layer", "attention_speed", "expert_overlap")
FEW = 2
ENOUGH = 4  # held-out runs for an interval of their own: the fewest that tell where 80 % of all lie
GOAL_KNOWN, GOAL_UNKNOWN = 0.10, 0.20  # the mean error to reach, for a known program and for any other
OUTLIER = "deepspeed-2021"
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
    candidates = [
        _centred([runs], _with(base, dict(zip(free, values)))) for values in product(*free.values())
    ]
    return min(candidates, key=lambda how: fmean(run.error(how) ** 2 for run in runs))


def fitted_default() -> tuple[float, float]:
    """Return the default (arithmetic, overlap).

    The overlap is that of SCALED, the only program with runs on 8 to 512 GPUs. `arithmetic` is fitted to the programs with
    FEW dense runs or more.
    """
    fitted_halves = (fitted_runs(name) for name in PROGRAMS)
    groups = [runs for runs in fitted_halves if len(runs) >= FEW and runs[0].kind != MIXTURE]
    overlap = fitted_program(SCALED).overlap
    return _centred(groups, Implementation(overlap=overlap)).arithmetic, overlap


def unknown_error(run: Run, default: Implementation) -> float:
    """Predict a run with its program's options, but with the fitted parameters taken from `default`; return the error.

    Options are, for example, which messages the program overlaps, and when it reduces gradients.
    """
    table = TABLES[run.table]
    numbers = {name: getattr(default, name) for name in FITTED}
    return run.error(_with(PROGRAMS[table.program].implementation, numbers))


def _with(how: Implementation, numbers: dict[str, Any]) -> Implementation:
    return replace(how, **numbers)


def _centred(groups: Sequence[Sequence[Run]], how: Implementation) -> Implementation:
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


def page() -> str:
    """Return the text of docs/planner.md."""
    runs = published_runs()
    held = [run for run in runs if run.held_out]
    lines = [
        "# The planner against published runs",
        "",
        "`minipar plan` predicts; this page says how wrong it was. `python -m minipar.extras.cost.fit docs/planner.md` "
        "writes it from [`published_runs.csv`](../minipar/extras/cost/published_runs.csv). "
        "[What it would choose](planner_choices.md) for published jobs is another page.",
        "",
        f"{len(runs)} runs are in the table, {len(held)} of them held out: no number was fitted to them. A run is held out "
        "if the first byte of the SHA-256 of its line (table, model, GPUs, tokens, samples, layout) is odd. The form of "
        "the model, though, was found by looking at all of them, and most are of two programs: expect larger errors of "
        "a new one. An error of +5 % means that the predicted step is 5 % longer than the measured one.",
        "",
        "## By program",
        "",
        "| program | fitted | held out | mean error | largest | doubt printed | arithmetic | overlap | gathers a layer | "
        "attention |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *_program_rows(),
        "",
        "Mean and largest errors are of held-out runs, without sign; of all runs where none is held out (*). A program "
        f"with fewer than {FEW} dense runs in the fitted half keeps minipar's numbers; mixtures of a program that has "
        f"dense runs, too, are only checked. *doubt printed*: by the rule below, where at least {ENOUGH} runs are held "
        "out. "
        "*arithmetic*: seconds in multiples of the formulas. *overlap*: the fraction of ZeRO-3's and gradients' messages "
        "that hides behind arithmetic. *attention*: the kernel's rate, in multiples of the machine's. Programs:",
        "",
        *(f"* `{name}`: {program.words}." for name, program in PROGRAMS.items()),
        "",
        "## By kind, for a program that is not known",
        "",
        "The same held-out runs, predicted with minipar's own numbers. `minipar plan` prints the spread as its doubt: the "
        "fraction that one more run of the kind stays within with a probability of 80 %. With n held-out runs that is the "
        "⌈0.8 (n + 1)⌉-th smallest error (split conformal prediction), so it is wider where runs are few: of four, the "
        "largest. cp has no held-out run, and gets the largest fraction of dense layouts.",
        "",
        "| kind of layout | runs | mean error | the next within, 80 % | doubt printed |",
        "|---|---|---|---|---|",
        *_kind_rows(held),
        "",
        f"All runs of `{OUTLIER}` fell into the fitted half. With the numbers of an unknown program its steps would be "
        "predicted too short by a factor of up to four: what a program does with ZeRO-3 on many nodes no formula can know. "
        "The same is true of experts: how well their small products and their all-to-alls run depends on the program more "
        "than on the layout, so the doubt of a mixture is wide. Not in the table, because a setting that matters is not "
        "printed: Megatron Core's README (samples of a microbatch, chunks), torchtitan's and Megatron-Bridge's runs in "
        "8 bits, and runs of mixtures whose all-to-alls overlap with other microbatches.",
        "",
        f"The goal is a mean error of {GOAL_KNOWN:.0%} where the program is known, and of {GOAL_UNKNOWN:.0%} where it is "
        f"not. Not reached by {', '.join(_short_of_goal(held))}. No factor was fitted to single runs to hide it.",
        "",
        "## Collectives by size",
        "",
        f"Measured times of NCCL's collectives, from {LEAST_BYTES / 1e6:.0f} MB up. *Before*: the mean error, without "
        "sign, of the sum of latency and bytes. *Now*: that of the model, which adds "
        f"{FILL} sqrt(latency bytes), for the chunks that fill the hops. The largest error is of one size. Curves on other "
        f"networks than InfiniBand are taken to need {1e6 * OTHER_NETWORK_S:.0f} us a hop, not NCCL's 14 us.",
        "",
        "| curve | collective | sizes | before | now | largest | used to | source |",
        "|---|---|---|---|---|---|---|---|",
        *rows(),
        "",
        "## Ranking",
        "",
        "Spearman's correlation of predicted and measured MFU within a table, over all of its runs. A table of like runs "
        "is the harder one: where all measured values lie within the model's error, no order can be expected.",
        "",
        "| table | runs | correlation | source |",
        "|---|---|---|---|",
        *_ranking_rows(),
        "",
        "## Every run",
        "",
        "| table | model | GPUs | tokens | samples | layout | error | used to |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        used = "check" if run.held_out else "fit"
        lines.append(
            f"| {run.table} | {run.model} | {run.gpus:,} | {run.seq_len:,} | {run.batch:,} | `{run.layout.name}` | "
            f"{math.expm1(run.error()):+.0%} | {used} |"
        )
    return "\n".join(lines) + "\n"


def _program_rows() -> Iterator[str]:
    for name, program in PROGRAMS.items():
        by_key = dict[str, list[Run]]()
        for run in runs_of(name):
            by_key.setdefault(spread_key(name, run.job().shape), []).append(run)
        for key, runs in by_key.items():
            yield _program_row(key, program.implementation, runs)


def _short_of_goal(held: Sequence[Run]) -> Iterator[str]:
    by_key, by_kind = dict[str, list[float]](), dict[str, list[float]]()
    for run in held:
        key = spread_key(TABLES[run.table].program, run.job().shape)
        by_key.setdefault(f"`{key}`", []).append(abs(math.expm1(run.error())))
        unknown = abs(math.expm1(unknown_error(run, Implementation())))
        by_kind.setdefault(f"{run.kind} of an unknown program", []).append(unknown)
    for groups, goal in ((by_key, GOAL_KNOWN), (by_kind, GOAL_UNKNOWN)):
        for name, errors in groups.items():
            if fmean(errors) > goal:
                yield f"{name} ({fmean(errors):.1%})"


def _program_row(key: str, how: Implementation, runs: Sequence[Run]) -> str:
    held = [run for run in runs if run.held_out]
    errors = [abs(math.expm1(run.error())) for run in held or runs]
    mark, printed = "" if held else " *", PROGRAM_SPREADS.get(key)
    return (
        f"| `{key}` | {len(runs) - len(held)} | {len(held)} | {fmean(errors):.1%}{mark} | {max(errors):.0%} | "
        f"{'its kind' if printed is None else f'{printed:.0%}'} | "
        f"{how.arithmetic:.2f} | {how.overlap:.1f} | {how.gathers_per_layer} | {how.attention_speed:.1f} |"
    )


def _kind_rows(held: Sequence[Run]) -> Iterator[str]:
    for kind, printed in SPREADS.items():
        errors = [unknown_error(run, Implementation()) for run in held if run.kind == kind]
        if errors:
            mean, within = (
                fmean(abs(math.expm1(e)) for e in errors),
                spread(math.expm1(abs(e)) for e in errors),
            )
            yield f"| {kind} | {len(errors)} | {mean:.1%} | {within:.1%} | {printed:.0%} |"


def _ranking_rows() -> Iterator[str]:
    for name, table in TABLES.items():
        runs = [run for run in published_runs() if run.table == name]
        if len(runs) >= 5:
            measured = [run.mfu for run in runs]
            predicted = [run.mfu * math.exp(-run.error()) for run in runs]
            yield f"| {name} | {len(runs)} | {spearman(measured, predicted):.2f} | {table.source} |"
        else:
            yield f"| {name} | {len(runs)} | too few | {table.source} |"


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
