"""Pictures of a plan: a rank's memory against the card, time against memory, and scaling curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.cost.layout import Job, Layout
from minipar.cost.memory import worst_rank_memory
from minipar.cost.plan_command import Curves, ScalingPoint
from minipar.cost.planner import Plan
from visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    YELLOW,
    new_figure,
    quiet,
    write,
)

COLOURS = {
    "parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "gathered units": SKY, "activations": VERMILION,
    "recomputation": YELLOW, "logits": PURPLE, "buffers": GREY, "context": FAINT,
}  # fmt: skip
GB = 1e9


def draw_plan(job: Job, layouts: Sequence[Layout], path: str | Path, plan: Plan | None = None) -> Path:
    """Write a picture of these layouts' memory and, for a search, of time against memory; return the path."""
    return write(plan_figure(job, layouts, plan), path)


def plan_figure(job: Job, layouts: Sequence[Layout], plan: Plan | None = None) -> Figure:
    """Draw the memory of each layout's fullest rank and, for a plan, all layouts that fit beside it."""
    figure = new_figure(5.2 + 4.6 * (plan is not None), 3.8)
    axes = figure.subplots(1, 1 + (plan is not None), squeeze=False)[0]
    bars = {layout.name: worst_rank_memory(job, layout)[1] for layout in layouts}
    memory_bars(axes[0], bars, job.machine.memory_bytes)
    if plan is not None:
        pareto(axes[1], plan)
    return figure


def memory_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]], card_bytes: float) -> None:
    """Draw a stacked bar per layout, in GB, and a line at the card's memory."""
    for y, items in enumerate(bars.values()):
        left = 0.0
        for kind, num_bytes in items.items():
            label = kind if y == 0 else None
            axes.barh(
                y,
                num_bytes / GB,
                0.6,
                left,
                color=COLOURS[kind],
                edgecolor="white",
                linewidth=0.6,
                label=label,
            )
            left += num_bytes / GB
        white = dict(facecolor="white", edgecolor="none", pad=0.6)
        axes.text(left, y, f" {left:.1f}", va="center", fontsize=SMALL, color=INK, bbox=white)
    axes.axvline(card_bytes / GB, color=INK, linewidth=1.2, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(bars)), list(bars))
    around = max(0.5, 1.5 - len(bars) / 2)  # a single bar is as thin as one of several
    axes.set_ylim(len(bars) - 1 + around, -around)
    axes.set_title(f"GB of the fullest rank; the card has {card_bytes / GB:.0f}", loc="left", fontsize=NORMAL)
    axes.legend(fontsize=SMALL, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.08))
    quiet(axes, grid="x")


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


def draw_curves(curves: Curves) -> Path:
    """Draw the curves that a view of a plan asks for, and write them to its file; return the path."""
    return write(scaling_figure(curves.lines, curves.mark), curves.path)


def draw_scaling(curves: Mapping[str, Sequence[ScalingPoint]], path: str | Path) -> Path:
    """Write `scaling_figure`; return the path."""
    return write(scaling_figure(curves), path)


def scaling_figure(
    curves: Mapping[str, Sequence[ScalingPoint]], bound: tuple[int, str] | None = None
) -> Figure:
    """Draw efficiency and the share of time in communication against the number of GPUs, a line per curve.

    bound  a number of GPUs to mark, and its label
    """
    figure = new_figure(8.8, 3.2)
    left, right = figure.subplots(1, 2)
    for (name, points), colour in zip(curves.items(), (BLUE, VERMILION, GREEN, ORANGE, PURPLE)):
        gpus = [p.gpus for p in points]
        left.plot(gpus, [p.efficiency for p in points], color=colour, marker="o", markersize=3, label=name)
        right.plot(gpus, [p.communication for p in points], color=colour, marker="o", markersize=3)
    most = max(p.communication for points in curves.values() for p in points)
    for axes, title, top in (
        (left, "work per GPU, against the fewest", 1.05),
        (right, "share of a step that waits for messages", min(1.05, max(0.25, 1.5 * most))),
    ):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0, top)
        axes.set_xlabel("GPUs", fontsize=SMALL)
        axes.set_title(title, loc="left", fontsize=NORMAL)
        quiet(axes, grid="y")
        if bound is not None:
            axes.axvline(bound[0], color=INK, linewidth=1, linestyle=(0, (3, 2)))
    if bound is not None:
        right.text(
            bound[0] * 0.85,
            0.98 * right.get_ylim()[1],
            bound[1],
            va="top",
            ha="right",
            fontsize=SMALL,
            color=INK,
        )
    left.legend(fontsize=SMALL, frameon=False, loc="lower left")
    return figure
