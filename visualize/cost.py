"""Pictures of a plan: the fullest rank's memory, the parts of a step's time, time against memory, and scaling curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.cost.doubt import doubt
from minipar.cost.layout import Job, Layout
from minipar.cost.memory import worst_rank_memory
from minipar.cost.planner import Plan
from minipar.cost.timing import step_time
from minipar.extras.cost.scaling import ScalingPoint
from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    IDLE,
    INK,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    YELLOW,
    Style,
    new_figure,
    quiet,
    write,
)

COLOURS = {
    "parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "gathered units": SKY, "activations": VERMILION,
    "recomputation": YELLOW, "logits": PURPLE, "buffers": GREY, "context": FAINT,
}  # fmt: skip
PART_STYLES: dict[str, Style] = {
    "compute": {"color": BLUE}, "recompute": {"color": SKY}, "tp": {"color": VERMILION}, "cp": {"color": YELLOW},
    "ep": {"color": PURPLE}, "zero3": {"color": GREEN}, "idle": IDLE, "pp": {"color": INK},
    "gradients": {"color": ORANGE}, "update": {"color": GREY},
}  # fmt: skip
GB = 1e9


def draw_plan(job: Job, layouts: Sequence[Layout], path: str | Path, plan: Plan | None = None) -> Path:
    """Write `plan_figure`; return the path."""
    return write(plan_figure(job, layouts, plan), path)


def plan_figure(job: Job, layouts: Sequence[Layout], plan: Plan | None = None) -> Figure:
    """Draw, for each layout, the memory of its fullest rank and the parts of a step; for a plan, all that fit below."""
    around = 1.3 + 0.28 * max(2, len(layouts))  # of titles and legends
    figure = new_figure(9.8, around + 3.2 * (plan is not None))
    rows = 1 + (plan is not None)
    grid = figure.add_gridspec(rows, 2, height_ratios=[around, 3.2][:rows])
    memory = {layout.name: worst_rank_memory(job, layout)[1] for layout in layouts}
    memory_bars(figure.add_subplot(grid[0, 0]), memory, job.machine.memory_bytes)
    time_bars(figure.add_subplot(grid[0, 1]), job, layouts)
    if plan is not None:
        pareto(figure.add_subplot(grid[1, :]), plan)
    return figure


def memory_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]], gpu_bytes: float) -> None:
    """Draw a stacked bar per layout, in GB, and a line at the GPU's memory."""
    styles: dict[str, Style] = {kind: {"color": colour} for kind, colour in COLOURS.items()}
    ends = _stacked(axes, list(bars.values()), styles, GB)
    for y, end in enumerate(ends):
        _say(axes, end, y, f"{end:.1f}")
    axes.axvline(gpu_bytes / GB, color=INK, linewidth=1.2, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_title(f"GB of the fullest rank; the GPU has {gpu_bytes / GB:.0f}", loc="left", fontsize=NORMAL)


def time_bars(axes: Axes, job: Job, layouts: Sequence[Layout]) -> None:
    """Draw a stacked bar per layout, in seconds a step, with the prediction's doubt as a line at its end."""
    ends = _stacked(axes, [step_time(job, layout).parts for layout in layouts], PART_STYLES)
    for y, (layout, end) in enumerate(zip(layouts, ends)):
        spread = doubt(job, layout) * end
        axes.plot([end - spread, end + spread], [y, y], color=INK, linewidth=1.2, marker="|", markersize=6)
        _say(axes, end + spread, y, f"{end:.3g}")
    axes.set_yticks(range(len(layouts)), [])
    axes.set_title("seconds a step, of the slowest rank", loc="left", fontsize=NORMAL)


def _stacked(
    axes: Axes, bars: Sequence[Mapping[str, float]], styles: Mapping[str, Style], unit: float = 1.0
) -> list[float]:
    """Draw the bars, each the sum of its items, from the top down; return where they end. Items of nothing are left out."""
    ends = [0.0] * len(bars)
    for kind, style in styles.items():
        widths = [bar.get(kind, 0.0) / unit for bar in bars]
        if any(widths):
            edge = {} if style is IDLE else {"edgecolor": "white", "linewidth": 0.6}
            axes.barh(range(len(bars)), widths, 0.6, ends, label=kind, **{**edge, **style})
        ends = [end + width for end, width in zip(ends, widths)]
    around = max(0.5, 1.5 - len(bars) / 2)  # a single bar is as thin as one of several
    axes.set_ylim(len(bars) - 1 + around, -around)
    axes.legend(fontsize=SMALL, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.12))
    quiet(axes, grid="x")
    return ends


def _say(axes: Axes, x: float, y: float, text: str) -> None:
    white = dict(facecolor="white", edgecolor="none", pad=0.6)
    axes.text(x, y, f" {text}", va="center", fontsize=SMALL, color=INK, bbox=white)


def pareto(axes: Axes, plan: Plan) -> None:
    """Draw a point for every layout that fits, and a line through those that no other beats in both time and memory."""
    sizes, seconds = zip(*((fit.num_bytes / GB, fit.seconds) for fit in plan.fits))
    axes.scatter(sizes, seconds, s=4, color=FAINT, label=f"{len(seconds):,} that were weighed and fit")
    front = plan.frontier
    axes.plot(
        [s / GB for _, s in front],
        [t for t, _ in front],
        color=BLUE,
        marker="o",
        markersize=3,
        label="Pareto front",
    )
    best = plan.choice
    axes.plot([best.num_bytes / GB], [best.seconds], "o", color=VERMILION, markersize=6, label=best.name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=SMALL)
    axes.set_xlabel("GB of the fullest rank", fontsize=SMALL)
    axes.set_title("seconds a step", loc="left", fontsize=NORMAL)
    axes.legend(fontsize=SMALL, frameon=False)
    quiet(axes, grid="both")


def scaling_figure(curves: Mapping[str, Sequence[ScalingPoint]]) -> Figure:
    """Draw efficiency and the share of time in communication against the number of GPUs, a line per curve."""
    figure = new_figure(8.8, 3.2)
    left, right = figure.subplots(1, 2)
    for (name, points), colour in zip(curves.items(), (BLUE, VERMILION, GREEN, ORANGE, PURPLE)):
        gpus = [p.gpus for p in points]
        left.plot(gpus, [p.efficiency for p in points], color=colour, marker="o", markersize=3, label=name)
        right.plot(gpus, [p.communication for p in points], color=colour, marker="o", markersize=3)
    most = max(p.communication for points in curves.values() for p in points)
    for axes, title, top in (
        (left, "work per GPU, against that of the fewest GPUs", 1.05),
        (right, "share of a step that waits for messages", min(1.05, max(0.25, 1.5 * most))),
    ):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, top)
        axes.set_xlabel("GPUs", fontsize=SMALL)
        axes.set_title(title, loc="left", fontsize=NORMAL)
        quiet(axes, grid="y")
    left.legend(fontsize=SMALL, frameon=False, loc="lower left")
    return figure
