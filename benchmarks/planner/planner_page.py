"""The text and the picture of docs/generated/planner.md: how far predictions lie from published runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.planner import roofline
from benchmarks.planner.ablation import scores
from benchmarks.planner.fit import (
    NUMBERS,
    covered,
    dense,
    mean_error,
    mixtures,
    pair_errors,
    ranking,
    runs_of,
    strangers_errors,
    unknown_error,
    weighted_quantile,
)
from benchmarks.planner.nccl_curves import LEAST_BYTES, OTHER_NETWORK_S, rows
from benchmarks.planner.published_runs import TABLES, Run, published_runs
from minipar.cost.doubt import DENSE, MIXED, NEAR, PER_DOUBLING, UNLIKE
from minipar.cost.layout import Implementation
from minipar.cost.links import FILL
from minipar.cost.machines import MACHINES
from minipar.cost.programs import PROGRAMS
from minipar.cost.timing import step_time
from minipar.visualize.style import BLUE, GREY, INK, NORMAL, ORANGE, SMALL, VERMILION, new_figure, quiet


def known_error(run: Run) -> float:
    return run.error()


def page() -> str:
    """Return the text of docs/generated/planner.md. It takes a minute, most of it for the ablation."""
    runs = published_runs()
    held = [run for run in runs if run.held_out]
    sections = (
        _introduction(runs, held), _ablation(), _by_program(runs), _doubt(runs), _unexplained(), _one_h200(),
        _collectives(), _ranking(), _every_run(runs),
    )  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def scatter() -> Figure:
    """Draw predicted against measured utilization: open marks for fitted runs, full ones for held-out runs."""
    figure = new_figure(6.4, 4.6)
    axes = figure.subplots()
    groups = (
        ("tp, pp or data parallel", BLUE, "tp, pp or data parallel"),
        ("ZeRO-3", ORANGE, "ZeRO-3"),
        ("mixtures of experts", VERMILION, "mixture"),
    )
    axes.plot([0, 70], [0, 70], color=INK, linewidth=0.8)
    for factor in (1 / (1 + DENSE), 1 + DENSE):
        axes.plot([0, 70], [0, 70 * factor], color=GREY, linewidth=0.6, linestyle="--")
    for name, colour, kind in groups:
        for held_out in (False, True):
            found = [run for run in published_runs() if run.kind == kind and run.held_out == held_out]
            axes.scatter(
                [100 * run.mfu for run in found],
                [100 * run.mfu * math.exp(-run.error()) for run in found],
                s=16, linewidths=0.8, edgecolors=colour, facecolors=colour if held_out else "none",
                label=f"{name}, {'held out' if held_out else 'fitted'}",
            )  # fmt: skip
    axes.set_xlim(0, 65)
    axes.set_ylim(0, 65)
    axes.set_xlabel("MFU as published, %", fontsize=NORMAL)
    axes.set_ylabel("MFU as predicted, %", fontsize=NORMAL)
    axes.legend(fontsize=SMALL, frameon=False)
    quiet(axes, "both")
    return figure


def _table(names: str, table_rows: Iterable[str]) -> list[str]:
    """Return a table's lines; `names` are its columns, separated by " | "."""
    return [f"| {names} |", "|" + "---|" * len(names.split(" | ")), *table_rows]


def _introduction(runs: Sequence[Run], held: Sequence[Run]) -> list[str]:
    errors: tuple[tuple[str, Callable[[Run], float], Callable[[Run], float]], ...] = (
        ("`minipar plan`", known_error, unknown_error),
        ("a roofline of six numbers", roofline.known_error, roofline.unknown_error),
    )
    return [
        "# The planner against published runs",
        "",
        "![Predicted against published utilization: full marks, held-out runs, lie along the diagonal](planner.png)",
        "",
        f"{len(runs)} published runs, {len(held)} of them held out: no number was fitted to these. A run is held out if "
        "the first byte of the SHA-256 of its line (table, model, GPUs, tokens, samples, layout) is odd. The form of the "
        f"model was found by looking at all of them, so expect larger errors elsewhere. Dashed: {DENSE:.0%}.",
        "",
        *_table(
            "mean error of held-out runs | dense, program known | dense, unknown | mixtures, known | unknown | ranking",
            (
                f"| {name} | {mean_error(dense(held), known):.1%} | {mean_error(dense(held), unknown):.1%} | "
                f"{mean_error(mixtures(held), known):.1%} | {mean_error(mixtures(held), unknown):.1%} | "
                f"{fmean(ranking(known).values()):.2f} |"
                for name, known, unknown in errors
            ),
        ),
        "",
        "*Known*: with the few numbers that are fitted to a program's own runs; *unknown*: with those fitted to all "
        "programs. *Ranking*: Spearman's correlation of predicted and measured utilization within a table of five runs or "
        "more, the mean over tables. The [roofline](../../benchmarks/planner/roofline.py) counts FLOPs, bytes and a "
        "bubble, and is fitted to the same half. `python -m benchmarks.planner.fit docs/generated` writes this page from "
        "[published_runs.csv](../../benchmarks/planner/published_runs.csv). [What the planner would "
        "choose](planner_choices.md) for published jobs is another page.",
    ]


def _ablation() -> list[str]:
    return [
        "## What each term buys",
        "",
        "One term left out or changed, the shares of arithmetic and attention fitted again; mean errors of held-out runs.",
        "",
        *_table(
            "model | dense, known | dense, unknown | mixtures | ranking of dense runs",
            (
                f"| {words} | {s.known:.1%} | {s.unknown:.1%} | {s.mixtures:.1%} | {s.ranking:.2f} |"
                for words, s in scores()
            ),
        ),
        "",
        "What these runs do not decide: that gradients hide nine tenths of their messages (0.3 fits them slightly better; "
        "DDP starts them during the backward, and most of these runs have ZeRO-3), that overlapped sums over tp hide "
        "eight tenths (no dense run here has them), and what the optimizer's update takes (it matters where a GPU has few "
        "samples, and no run here has so few). Left out, since they bought nothing on held-out runs: how often each "
        "schedule waits for messages between stages, copies that join tokens, the traffic of "
        "gradients that a product adds up, gathers tensor by tensor. Bandwidth that falls with nodes is the last line: it "
        "was not taken, though clusters elsewhere lose more; the doubt grows with nodes instead.",
    ]


def _by_program(runs: Sequence[Run]) -> list[str]:
    columns = (
        "program | fitted | held out | mean error | as an unknown program | largest | arithmetic | attention"
    )
    return [
        "## By program",
        "",
        *_table(columns, _program_rows()),
        "",
        "Errors are of held-out runs, without sign; of all where none is held out (*). A program has numbers of its own "
        f"({', '.join(f'`{name}`' for name in NUMBERS)}) only where they bring its held-out runs nearer. *arithmetic*: "
        "seconds in multiples of the formulas. *attention*: the kernel's rate, in multiples of the machine's.",
        "",
        *(f"* `{name}`: {program.words}." for name, program in PROGRAMS.items()),
    ]


def _program_rows() -> Iterator[str]:
    for name, program in PROGRAMS.items():
        for kind, select in (("", dense), (", mixtures", mixtures)):
            of_kind = select(runs_of(name))
            held = [run for run in of_kind if run.held_out]
            shown, mark = held or of_kind, "" if held else " *"
            if shown:
                how = program.implementation
                largest = max(abs(math.expm1(run.error())) for run in shown)
                yield (
                    f"| `{name}`{kind} | {len(of_kind) - len(held)} | {len(held)} | "
                    f"{mean_error(shown, known_error):.1%}{mark} | {mean_error(shown, unknown_error):.1%}{mark} | "
                    f"{largest:.0%} | {how.arithmetic:.2f} | {how.attention_speed:.1f} |"
                )


def _doubt(runs: Sequence[Run]) -> list[str]:
    errors = strangers_errors()
    held = [(run, error) for run, error in errors if run.held_out]
    return [
        "## Doubt",
        "",
        f"`minipar plan` prints as doubt {DENSE:.0%} for dense models and {MIXED:.0%} for mixtures, {PER_DOUBLING:.0%} "
        f"more for each doubling of the nodes, and {UNLIKE:.0%} more for each of cp, a schedule or a tp that no run here "
        "has, and a machine that none ran on. The same holds for a program with numbers of its own: on a table that they "
        "were not fitted to, they did not do better. Counted with numbers fitted to all other programs alone:",
        "",
        *_table("runs | number | mean error | within the doubt", _doubt_rows(errors, held)),
        "",
        f"Two layouts of one model in one table are compared better: for four of five pairs of held-out runs, "
        f"{len(pair_errors())} pairs, the predicted ratio errs by less than "
        f"{weighted_quantile([(e, 1.0) for e in pair_errors()], 0.8):.1%}. So times within {NEAR:.0%} count as equal.",
    ]


def _doubt_rows(errors: Sequence[tuple[Run, float]], held: Sequence[tuple[Run, float]]) -> Iterator[str]:
    for words, found in (("all", errors), ("held out", held)):
        for kind, select in (("dense", dense), ("mixtures", mixtures)):
            chosen = select([run for run, _ in found])
            of_kind = [(run, error) for run, error in found if run in chosen]
            mean = fmean(error for _, error in of_kind)
            yield f"| {kind}, {words} | {len(of_kind)} | {mean:.1%} | {covered(of_kind):.0%} |"


def _unexplained() -> list[str]:
    def bias(program: str, model: str = "") -> str:
        runs = [run for run in runs_of(program) if not model or run.model == model]
        return f"{fmean(math.expm1(run.error()) for run in runs):+.0%}"

    return [
        "## What the formulas do not explain",
        "",
        f"* `deepspeed-2021` ({bias('deepspeed-2021')}): what a program does with ZeRO-3 on many nodes no formula can "
        "know. All of its runs fell into the fitted half, so no number of its own could be checked.",
        f"* gpt-oss-120b ({bias('megatron-core', 'gpt-oss-120b')}): its products are 2,880 wide, no multiple of a kernel's "
        "tiles, its scores have a learned offset, and each expert's bias is added by itself.",
        "* Layers with 1,024 tokens or fewer on a GPU (tp 4 of `moe-zoo` and `xtuner`): the CPU starts kernels more slowly "
        "than they run, by how much is not published.",
        "* KempnerForge's mixtures: each layer pads all experts to the rows of the fullest one, and how full that was is "
        "not printed. Its dense runs with tp take half as long again as with one GPU, without a reason in print.",
        "* Not in the table, because a setting that matters is not printed: Megatron Core's README (samples of a "
        "microbatch), xtuner's runs with experts on four nodes, AutoModel's of 1,024 GPUs, one of Megatron-MoE-ModelZoo "
        "whose sharding is not printed, and Megatron's whose routers were not forced to balance. Nor, because the model "
        "has no such layout: runs in 8 bits, all-to-alls behind other microbatches, a pipeline that drains twice a step.",
    ]


def _one_h200() -> list[str]:
    """Compare what one GPU was measured to do with what the planner assumes of it."""
    measured = json.loads(
        (Path(__file__).parents[2] / "docs" / "generated" / "gpu.json").read_text(encoding="utf-8")
    )
    machine = MACHINES[measured["about"]["planner's machine"]]
    products = {row["tokens x in x out"]: row["of the peak"] for row in measured["products"]}
    large = [rate for sizes, rate in products.items() if min(map(int, sizes.split(" x "))) >= 4096]
    layers_ms = [
        row["launched, ms"] / int(row["model"].split()[0])
        for row in measured["launches"]
        if "layers" in row["model"]
    ]
    in_a_run = machine.matmul_fraction * machine.share / Implementation().arithmetic
    return [
        "## One H200",
        "",
        f"Measured on one {measured['about']['GPU']} ([gpu.md](../gpu.md)), never fitted: large products in bfloat16 "
        f"reach {min(large):.0%} to {max(large):.0%} of the peak; the planner takes {machine.matmul_fraction:.0%} for the "
        f"best of them, and {in_a_run:.0%} in a run. To launch a layer's forward takes the host {min(layers_ms):.1f} to "
        f"{max(layers_ms):.1f} ms: a layer that computes for less waits for it, which the planner leaves out.",
    ]


def _collectives() -> list[str]:
    return [
        "## Collectives by size",
        "",
        f"Measured times of NCCL's collectives, from {LEAST_BYTES / 1e6:.0f} MB up. *Before*: the mean error, without "
        f"sign, of the sum of latency and bytes. *Now*: with {FILL} sqrt(latency bytes) added, for the chunks that fill "
        "the hops. Curves on networks other than InfiniBand are taken to need "
        f"{1e6 * OTHER_NETWORK_S:.0f} us a hop, not NCCL's 14 us.",
        "",
        *_table("curve | collective | sizes | before | now | largest | used to | source", rows()),
    ]


def _ranking() -> list[str]:
    ours, plain = ranking(), ranking(roofline.known_error)
    return [
        "## Ranking",
        "",
        "Within a table of five runs or more, held out or not. Where all measured values lie within the model's error, no "
        "order can be expected.",
        "",
        *_table(
            "table | correlation | roofline's | source",
            (f"| {name} | {ours[name]:.2f} | {plain[name]:.2f} | {TABLES[name].source} |" for name in ours),
        ),
    ]


def _every_run(runs: Sequence[Run]) -> list[str]:
    return [
        "## Every run",
        "",
        "<details><summary>Sources of the tables, and the error of each run: +5 % means that the predicted step is 5 % "
        "longer than the measured one</summary>",
        "",
        *_table(
            "table | program | source", (f"| {n} | {t.program} | {t.source} |" for n, t in TABLES.items())
        ),
        "",
        *_table(
            "table | model | GPUs | tokens | samples | layout | error | parts | used to", map(_run_row, runs)
        ),
        "",
        "</details>",
    ]


def _run_row(run: Run) -> str:
    parts = step_time(run.job(), run.layout).parts
    total = sum(parts.values())
    shares = ", ".join(f"{name} {s / total:.0%}" for name, s in parts.items() if s > 0.05 * total)
    return (
        f"| {run.table} | {run.model} | {run.gpus:,} | {run.seq_len:,} | {run.batch:,} | `{run.layout.name}` | "
        f"{math.expm1(run.error()):+.0%} | {shares} | {'check' if run.held_out else 'fit'} |"
    )
