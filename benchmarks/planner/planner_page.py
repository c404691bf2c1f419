"""The text of docs/generated/planner.md: how far predictions lie from published runs. A function for each section."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from benchmarks.planner.fit import ENOUGH, FEW, runs_of, spearman, unknown_error
from benchmarks.planner.nccl_curves import LEAST_BYTES, OTHER_NETWORK_S, rows
from benchmarks.planner.published_runs import TABLES, Run, published_runs, spread
from minipar.cost.doubt import MIXTURE, PROGRAM_SPREADS, SPREADS, spread_key
from minipar.cost.layout import Implementation
from minipar.cost.links import FILL, axis_links
from minipar.cost.programs import PROGRAMS
from minipar.cost.timing import step_time

GOAL_KNOWN, GOAL_UNKNOWN = 0.10, 0.20  # the mean error to reach, for a known program and for any other
OUTLIER = "deepspeed-2021"
# A step of moe-zoo's run with ep=32 whose all-to-alls overlap with other microbatches; same source.
OVERLAPPED_S = 17.6
FEW_TOKENS = 1024  # of a microbatch on one GPU


def page() -> str:
    """Return the text of docs/generated/planner.md."""
    runs = published_runs()
    held = [run for run in runs if run.held_out]
    sections = (
        _introduction(runs, held),
        _by_program(),
        _by_kind(held),
        _mixtures([run for run in runs if run.kind == MIXTURE]),
        _collectives(),
        _ranking(runs),
        _every_run(runs),
    )
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _table(names: str, table_rows: Iterable[str]) -> list[str]:
    """Return a table's lines; `names` are its columns, separated by " | "."""
    return [f"| {names} |", "|" + "---|" * len(names.split(" | ")), *table_rows]


def _introduction(runs: Sequence[Run], held: Sequence[Run]) -> list[str]:
    return [
        "# The planner against published runs",
        "",
        "`minipar plan` predicts; this page says how wrong it was. "
        "`python -m benchmarks.planner.fit docs/generated/planner.md` "
        "writes it from [`published_runs.csv`](../../benchmarks/planner/published_runs.csv). "
        "[What it would choose](planner_choices.md) for published jobs is another page.",
        "",
        f"{len(runs)} runs are in the table, {len(held)} of them held out: no number was fitted to them. A run is held out "
        "if the first byte of the SHA-256 of its line (table, model, GPUs, tokens, samples, layout) is odd. The form of "
        "the model, though, was found by looking at all of them, and most are of two programs: expect larger errors of "
        "a new one. An error of +5 % means that the predicted step is 5 % longer than the measured one.",
    ]


# By program --------------------------------------------------------------------------------------------------------------


def _by_program() -> list[str]:
    columns = (
        "program | fitted | held out | mean error | largest | doubt printed | arithmetic | overlap | gathers a layer | "
        "attention"
    )
    return [
        "## By program",
        "",
        *_table(columns, _program_rows()),
        "",
        "Mean and largest errors are of held-out runs, without sign; of all runs where none is held out (*). A program "
        f"with fewer than {FEW} dense runs in the fitted half keeps minipar's numbers; mixtures of a program that has "
        f"dense runs, too, are only checked. *doubt printed*: by the rule below, where at least {ENOUGH} runs are held "
        "out. "
        "*arithmetic*: seconds in multiples of the formulas. *overlap*: the fraction of ZeRO-3's and gradients' messages "
        "that hides behind arithmetic; no fitted run of `megatron-core` has ZeRO-3, so with ZeRO-3 it has minipar's. "
        "*attention*: the kernel's rate, in multiples of the machine's. Programs:",
        "",
        *(f"* `{name}`: {program.words}." for name, program in PROGRAMS.items()),
    ]


def _program_rows() -> Iterator[str]:
    for name, program in PROGRAMS.items():
        by_key = dict[str, list[Run]]()
        for run in runs_of(name):
            by_key.setdefault(spread_key(name, run.job().shape), []).append(run)
        for key, runs in by_key.items():
            yield _program_row(key, program.implementation, runs)


def _program_row(key: str, how: Implementation, runs: Sequence[Run]) -> str:
    held = [run for run in runs if run.held_out]
    errors = [abs(math.expm1(run.error())) for run in held or runs]
    mark, printed = "" if held else " *", PROGRAM_SPREADS.get(key)
    return (
        f"| `{key}` | {len(runs) - len(held)} | {len(held)} | {fmean(errors):.1%}{mark} | {max(errors):.0%} | "
        f"{'its kind' if printed is None else f'{printed:.0%}'} | "
        f"{how.arithmetic:.2f} | {how.overlap:.1f} | {how.gathers_per_layer} | {how.attention_speed:.1f} |"
    )


# By kind of layout -------------------------------------------------------------------------------------------------------


def _by_kind(held: Sequence[Run]) -> list[str]:
    return [
        "## By kind, for a program that is not known",
        "",
        "The same held-out runs, predicted with minipar's own numbers. `minipar plan` prints the spread as its doubt: the "
        "fraction that one more run of the kind stays within with a probability of 80 %. With n held-out runs that is the "
        "⌈0.8 (n + 1)⌉-th smallest error (split conformal prediction), so it is wider where runs are few: of four, the "
        "largest. cp has no held-out run, and gets the largest fraction of dense layouts.",
        "",
        *_table(
            "kind of layout | runs | mean error | the next within, 80 % | doubt printed", _kind_rows(held)
        ),
        "",
        f"All runs of `{OUTLIER}` fell into the fitted half. With the numbers of an unknown program its steps would be "
        "predicted too short by a factor of up to four: what a program does with ZeRO-3 on many nodes no formula can know. "
        "The same is true of experts: how well their small products and their all-to-alls run depends on the program more "
        "than on the layout, so the doubt of a mixture is wide. Not in the table, because a setting that matters is not "
        "printed: Megatron Core's README (samples of a microbatch, chunks), xtuner's runs with experts on four nodes (the "
        "network), AutoModel's of 1,024 GPUs (two numbers of chunks are), and Megatron's whose routers were not forced to "
        "balance. Not in the table either, because the model has no such layout: runs in 8 bits, mixtures whose "
        "all-to-alls overlap with other microbatches (Megatron-Bridge's of gpt-oss on GB200 since 26.04), AutoModel's of "
        "Kimi K2, whose pipeline drains twice a step, and KempnerForge's with pp, whose head is not split over tp, or "
        "with ep, whose ranks have the same samples.",
        "",
        'One run was taken out: Megatron-MoE-ModelZoo\'s of Qwen3-235B with "FSDP: On", 17.6 s a step. What is sharded, '
        "and in how many bits gradients are summed, is not printed. If weights are sharded, too, and gradients are summed "
        "in 32 bits after each microbatch, as is the default of Megatron Core at the commit that it names "
        "(`grad_reduce_every_bprop` in `custom_fsdp`), then the experts' messages alone take 17.6 s at the full rate of "
        "the cards, which no message reaches: something else was run. The prediction would be 125% longer than the step, "
        "with 16 bits 102%, and 34% if all messages could hide, too.",
        "",
        f"The goal is a mean error of {GOAL_KNOWN:.0%} where the program is known, and of {GOAL_UNKNOWN:.0%} where it is "
        f"not. Not reached by {', '.join(_short_of_goal(held))}. No factor was fitted to single runs to hide it.",
        "",
        _slow_tp(),
    ]


def _slow_tp() -> str:
    """Say what is not explained of KempnerForge's runs with tp."""
    one, two = (
        next(run for run in runs_of("kempnerforge") if run.layout.name == name)
        for name in ("dp1-zero0-mb2-full", "tp2-zero0-mb4-full")
    )
    one_s, two_s = _measured_s(one), _measured_s(two)
    messages_s = step_time(two.job(), two.layout).parts["tp"]
    return (
        f"Not explained of `kempnerforge`: {one.batch} samples take {one_s:.2f} s on one GPU and {two_s:.2f} s on "
        f"two with tp. Without messages and copies, predicted to take {messages_s:.2f} s, the two need "
        f"{(two_s - messages_s) / (one_s / 2) - 1:.0%} more than half of the one's time. Whether its kernels are fused "
        "with tp, too, is not printed. In its profile of a run that was not compiled "
        "(`benchmarks/profiling/13b_24gpu_profiling.md`), q, k, v, gate and up gather their inputs one by one, so that a "
        "layer sends 20 messages over tp for a microbatch; 13 are counted here. Whether the compiler joins them is not "
        "printed either."
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


# Mixtures ----------------------------------------------------------------------------------------------------------------

COLUMNS = {  # the parts of a step that each column of _mixture_rows adds up
    "arithmetic": ("compute",),
    "again": ("recompute",),
    "all-to-all": ("ep",),
    "ZeRO-3": ("zero3",),
    "gradients": ("gradients",),
    "idle": ("idle",),
    "other": ("tp", "cp", "pp", "update"),
}


def _mixtures(runs: Sequence[Run]) -> list[str]:
    columns = " | ".join(
        ("table", "model", "layout", "used to", "rows", "nodes", "measured", *COLUMNS, "error")
    )
    return [
        "## Mixtures, part by part",
        "",
        "What is predicted for each mixture of experts, in per cent of the *measured* time, so that the parts add up to "
        "100 % plus the error. *rows*: the rows that an expert computes for one microbatch, if all experts get as many. "
        "*nodes*: those that an all-to-all spans. *again*: recomputation.",
        "",
        *_table(columns, map(_mixture_row, runs)),
        "",
        "What the formulas do not explain:",
        "",
        *(f"* {text}" for text in _unexplained(runs)),
        "",
        "Terms that were tried for `megatron-core`, its arithmetic fitted anew, and left out. Most would improve the "
        "held-out half, too, but no cause of their size is known.",
        "",
        *_table("term | fitted half, root mean square | held out, mean | why not", LEFT_OUT),
    ]


def _mixture_row(run: Run) -> str:
    job, a = run.job(), run.layout
    parts = step_time(job, a).parts
    measured_s = _measured_s(run)
    shares = (sum(parts[part] for part in names) / measured_s for names in COLUMNS.values())
    nodes = axis_links(job.machine, a, "ep", job.implementation.fold_experts).nodes
    return (
        f"| {run.table} | {run.model} | `{a.name}` | {'check' if run.held_out else 'fit'} | {_expert_rows(run):,.0f} | "
        f"{nodes} | {measured_s:.1f} s | {' | '.join(f'{share:.0%}' for share in shares)} | "
        f"{math.expm1(run.error()):+.0%} |"
    )


def _measured_s(run: Run) -> float:
    return step_time(run.job(), run.layout).total * math.exp(-run.error())


def _expert_rows(run: Run) -> float:
    """Return the rows that an expert computes for one microbatch, if all experts get as many."""
    a, shape = run.layout, run.job().shape
    senders = a.ep / (a.tp if run.job().implementation.fold_experts else 1)
    return a.tokens(run.job()) * senders * shape.top_k / shape.num_experts


def _unexplained(runs: Sequence[Run]) -> Iterator[str]:
    core = [run for run in runs if TABLES[run.table].program == "megatron-core"]
    narrow = fmean(math.expm1(run.error()) for run in core if run.model == "gpt-oss-120b")
    wide = fmean(math.expm1(run.error()) for run in core if run.model != "gpt-oss-120b")
    yield (
        f"gpt-oss-120b has a mean error of {narrow:+.0%}, the other runs of `megatron-core` {wide:+.0%}. Its "
        "products are 2,880 wide, no multiple of a kernel's tiles of 128 or 256, its scores have a learned offset, and "
        "each expert's bias is added by itself; how much slower kernels get is not published. That half of its layers "
        "attend to 128 tokens alone is not counted, and would make its prediction shorter still."
    )
    full = [run for run in core if run.layout.recompute == "full"]
    few = [run for run in core if run.model == full[0].model and _tokens(run) <= FEW_TOKENS]
    yield (
        f"Of one model on 256 GPUs, steps are predicted too long where a layer has many tokens in a microbatch "
        f"({_errors(full)}, all of them recomputed), and too short where a GPU has {FEW_TOKENS:,} or fewer of them "
        f"({_errors(few)}): the CPU then starts kernels more slowly than they run, as Megatron Core's README says of small "
        "microbatches and of tp, by how much it does not."
    )
    away = next(run for run in core if run.table == "moe-zoo" and run.layout.ep == 32)
    all_to_all = step_time(away.job(), away.layout).parts["ep"] / _measured_s(away)
    yield (
        f"`{away.layout.name}`: its all-to-alls between four nodes are predicted to take {all_to_all:.0%} of the measured "
        f"step. Overlapped with other microbatches, the same run took {OVERLAPPED_S} s in place of "
        f"{_measured_s(away):.1f} s, so they took {1 - OVERLAPPED_S / _measured_s(away):.0%} or more; how much more is not "
        "known."
    )
    yield (
        "KempnerForge's mixtures were not compiled, unlike its dense runs (`moe_packed_bench.sh`). Each layer pads all "
        "experts to the rows of the fullest one, and the host waits for the numbers of rows "
        "(`grouped_expert_forward_packed` in its `model/moe.py`). How full the fullest expert was is not printed. Of a "
        "model of the same sizes it reports that the emptiest had about a thousandth of its rows in the first steps "
        "(`moe_ep_benchmark.md`), so all rows are padded many times over."
    )


def _tokens(run: Run) -> float:
    """Return the tokens of one microbatch on one GPU, where sequence parallelism has split them."""
    return run.layout.tokens(run.job()) / run.layout.tp


def _errors(runs: Iterable[Run]) -> str:
    return ", ".join(f"{math.expm1(run.error()):+.0%}" for run in runs)


# Terms that were tried for `megatron-core`, with the root mean square of log(predicted / measured) over the fitted half
# after all its numbers were fitted anew, and the mean error of the held-out half. Computed when they were tried.
LEFT_OUT = (
    "| none of them | 0.204 | 18.7% | |",
    "| 1 ms to start each layer of a microbatch | 0.203 | 17.4% | the fitted half cannot tell it from none |",
    "| 0.1 ms to start each expert's products | 0.205 | 16.5% | nor this |",
    "| a GB300 1.2 times as fast as a GB200 | 0.188 | 21.5% | |",
    "| arithmetic of gpt-oss-120b 1.4 times as slow | 0.146 | 13.8% | a factor of one model |",
)


# Collectives, ranking, runs ----------------------------------------------------------------------------------------------


def _collectives() -> list[str]:
    return [
        "## Collectives by size",
        "",
        f"Measured times of NCCL's collectives, from {LEAST_BYTES / 1e6:.0f} MB up. *Before*: the mean error, without "
        "sign, of the sum of latency and bytes. *Now*: that of the model, which adds "
        f"{FILL} sqrt(latency bytes), for the chunks that fill the hops. The largest error is of one size. Curves on other "
        f"networks than InfiniBand are taken to need {1e6 * OTHER_NETWORK_S:.0f} us a hop, not NCCL's 14 us.",
        "",
        *_table("curve | collective | sizes | before | now | largest | used to | source", rows()),
    ]


def _ranking(runs: Sequence[Run]) -> list[str]:
    return [
        "## Ranking",
        "",
        "Spearman's correlation of predicted and measured MFU within a table, over all of its runs. A table of like runs "
        "is the harder one: where all measured values lie within the model's error, no order can be expected.",
        "",
        *_table("table | runs | correlation | source", _ranking_rows(runs)),
    ]


def _ranking_rows(runs: Sequence[Run]) -> Iterator[str]:
    for name, table in TABLES.items():
        of_table = [run for run in runs if run.table == name]
        if len(of_table) >= 5:
            measured = [run.mfu for run in of_table]
            predicted = [run.mfu * math.exp(-run.error()) for run in of_table]
            yield f"| {name} | {len(of_table)} | {spearman(measured, predicted):.2f} | {table.source} |"
        else:
            yield f"| {name} | {len(of_table)} | too few | {table.source} |"


def _every_run(runs: Sequence[Run]) -> list[str]:
    return [
        "## Every run",
        "",
        *_table("table | model | GPUs | tokens | samples | layout | error | used to", map(_run_row, runs)),
    ]


def _run_row(run: Run) -> str:
    return (
        f"| {run.table} | {run.model} | {run.gpus:,} | {run.seq_len:,} | {run.batch:,} | `{run.layout.name}` | "
        f"{math.expm1(run.error()):+.0%} | {'check' if run.held_out else 'fit'} |"
    )
