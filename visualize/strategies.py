"""Each strategy alone on eight ranks: what one rank holds, and what it sends in a step.

    python -m minipar.visualize.strategies [--model llama-7b] [--out docs/generated/strategies.png]

The bytes are those of `minipar plan`; docs/generated/strategies.md has the same as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from minipar.config.check_paths import require_picture
from minipar.cost.layout import Implementation, Job, Layout, parse_layout
from minipar.cost.machines import MACHINES
from minipar.cost.memory import rank_memory
from minipar.cost.model_table import find_model
from minipar.cost.traffic import step_traffic
from minipar.visualize.cost import COLOURS, GB
from minipar.visualize.style import BLUE, INK, NORMAL, SMALL, new_figure, quiet, write

RANKS, TOKENS = 8, 4096
KINDS = ("parameters", "gradients", "optimizer state", "activations")
_WHOLE_TOKENS = Implementation(sequence_parallel=False)
# label -> layout, the pp coordinate whose messages are counted, and what differs in the program
STRATEGIES: dict[str, tuple[str, int, Implementation]] = {
    "one GPU": ("dp1", 0, Implementation()),
    "data parallel": ("dp8-zero0", 0, Implementation()),
    "ZeRO-1": ("dp8-zero1", 0, Implementation()),
    "ZeRO-2": ("dp8-zero2", 0, Implementation()),
    "ZeRO-3": ("dp8-zero3", 0, Implementation()),
    "hybrid, 2 x 4": ("dp8-zero3", 0, Implementation(replicate=2)),
    "tensor": ("tp8", 0, _WHOLE_TOKENS),
    "tensor, sequence": ("tp8", 0, Implementation()),
    "pipeline": ("pp8-1f1b", 1, Implementation()),
    "context, ring": ("cp8", 0, Implementation()),
    "context, Ulysses": ("cp8-ulysses", 0, Implementation()),
    "recompute, dp": ("dp8-zero0-full", 0, Implementation()),
}


class Bars(NamedTuple):
    """What a rank holds, in bytes by kind of KINDS, and the bytes that it sends in a step."""

    held: Mapping[str, float]
    sent_bytes: float


def bars_of(model: str) -> dict[str, Bars]:
    """Return the bars of each of STRATEGIES for a step of eight samples, one at a time."""
    found = {}
    for label, (name, rank, how) in STRATEGIES.items():
        layout: Layout = parse_layout(name)
        gpus = layout.world_size
        job = Job(find_model(model), MACHINES["h100"], gpus, TOKENS, RANKS, implementation=how)
        items = rank_memory(job, layout, 0)
        sent = sum(axis.total for axis in step_traffic(job, layout, rank).values())
        found[label] = Bars({kind: items[kind] for kind in KINDS}, sent)
    return found


def draw_strategies(bars: Mapping[str, Bars], title: str, path: str | Path) -> Path:
    """Write `strategies_figure` to a .png, .svg or .pdf; return the path."""
    return write(strategies_figure(bars, title), path)


def strategies_figure(bars: Mapping[str, Bars], title: str) -> Figure:
    """Draw for each strategy what a rank holds, as stacked bars, and beside it what it sends in a step."""
    if not bars:
        raise ValueError("no strategies to draw; give at least one")
    figure = new_figure(4.8, 0.34 * len(bars) + 1.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=NORMAL)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    most = max(bar.sent_bytes for bar in bars.values()) / GB
    for y, bar in enumerate(bars.values()):
        start = 0.0
        for kind, num_bytes in bar.held.items():
            left.barh(y, num_bytes / GB, 0.72, start, color=COLOURS[kind], label=kind if y == 0 else None)
            start += num_bytes / GB
        left.text(start, y, f" {start:.0f}", va="center", fontsize=SMALL, color=INK)
        right.barh(y, bar.sent_bytes / GB, 0.72, color=BLUE)
        right.text(
            bar.sent_bytes / GB + 0.02 * most,
            y,
            f"{bar.sent_bytes / GB:.3g}",
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    left.set_yticks(range(len(bars)), list(bars))
    left.set_ylim(len(bars) - 0.4, -0.6)
    left.margins(x=0.16)
    right.margins(x=0.34)
    left.set_title("GB a rank holds", loc="left", fontsize=NORMAL)
    right.set_title("GB sent in a step", loc="left", fontsize=NORMAL)
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=SMALL, frameon=False, ncols=2, loc="outside lower center"
    )
    for axes in (left, right):
        quiet(axes, grid="x")
    left.tick_params(axis="y", labelsize=NORMAL, length=0)
    right.tick_params(axis="y", length=0)
    return figure


def main(model: str = "llama-7b", out: Path = Path("runs/strategies.png")) -> None:
    """Draw what a rank holds and sends under each strategy alone, on eight ranks.

    Args:
        model: a name of the planner's, or a .toml file.
        out: a .png, .svg or .pdf.
    """
    require_picture("out", out)
    title = f"{model} on {RANKS} ranks, a step of {RANKS} x {TOKENS:,} tokens"
    print(f"wrote {draw_strategies(bars_of(model), title, out)}")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main, prog="python -m minipar.visualize.strategies")
    except ValueError as error:
        raise SystemExit(f"minipar.visualize.strategies: {error}") from None
