"""Pictures of saving and resuming: a day with failures, a tensor's parts, a resumed run's loss, stalls, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minipar.mesh.regions import Box
from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    IDLE,
    INK,
    NORMAL,
    ORANGE,
    RANKS,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    text_on,
    write,
)

OF_A_DAY: dict[str, Style] = {
    "work": dict(color=BLUE), "save": dict(color=ORANGE), "lost": dict(color=VERMILION), "restart": IDLE,
}  # fmt: skip


def draw_days(days: Mapping[str, Sequence[tuple[str, float, float]]], title: str, path: str | Path) -> Path:
    """Draw days of 24 hours below each other, each with its goodput; return the path.

    days  name -> one (kind, first hour, last hour) per stretch of time; kind is work, save, lost or restart
    """
    figure = new_figure(10, 1 + 0.6 * len(days))
    axes = figure.subplots()
    for row, spans in enumerate(days.values()):
        for what, start, end in spans:
            axes.broken_barh([(start, end - start)], (row, 0.8), **OF_A_DAY[what])
        goodput = sum(end - start for what, start, end in spans if what == "work") / 24
        axes.text(24.2, row + 0.4, f"{goodput:.0%}", va="center", fontsize=NORMAL)
    axes.set(xlim=(0, 24), ylim=(len(days) - 0.1, -0.1), xticks=range(0, 25, 3))
    axes.set_xlabel("hours", fontsize=NORMAL)
    axes.set_title(title, loc="left", fontsize=NORMAL)
    axes.set_title("goodput", loc="right", fontsize=NORMAL)
    handles = [Patch(**style, label=what) for what, style in OF_A_DAY.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=NORMAL)
    _rows(axes, list(days))
    return write(figure, path)


def draw_parts(
    title: str, shape: tuple[int, int], owners: Mapping[str, Iterable[tuple[int, Box]]], path: str | Path
) -> Path:
    """Draw which rank has which rows and columns of a matrix, in one drawing per name of `owners`; return the path.

    owners  name -> (rank, box with `start` and `length`)
    """
    figure = new_figure(7.5, 3.6)
    for axes, (name, boxes) in zip(figure.subplots(1, len(owners), squeeze=False)[0], owners.items()):
        labelled = set()
        for rank, box in boxes:
            (y, x), (height, width) = box.start, box.length
            axes.add_patch(Rectangle((x, y), width, height, facecolor=RANKS[rank], edgecolor="none"))
            if rank not in labelled and width == shape[1]:
                labelled.add(rank)
                style: Style = dict(ha="center", va="center", color=text_on(RANKS[rank]), fontsize=NORMAL)
                axes.text(shape[1] / 2, y + height / 2, f"rank {rank}", **style)
        axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[0, shape[1]], yticks=[0, shape[0]])
        axes.set_title(name, loc="left", fontsize=NORMAL)
        quiet(axes)
    figure.suptitle(title, fontsize=NORMAL)
    return write(figure, path)


def draw_resumed(
    whole: Mapping[int, float],
    before: Mapping[int, float],
    after: Mapping[int, float],
    labels: Sequence[str],
    path: str | Path,
) -> Path:
    """Draw the losses of a run that never stopped, of a run that stopped, and of its continuation; return the path."""
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    axes.plot(list(whole), list(whole.values()), color=GREY, linewidth=1.2, label=labels[0])
    axes.plot(list(before), list(before.values()), "o", color=BLUE, markersize=4, label=labels[1])
    axes.plot(
        list(after),
        list(after.values()),
        "o",
        color=VERMILION,
        fillstyle="none",
        markersize=8,
        label=labels[2],
    )
    first, last = min(after), max(before)
    axes.axvspan(first - 0.5, last + 0.5, ymax=0.62, color=FAINT, linewidth=0)
    low, high = min(whole.values()), max(whole.values())
    axes.text(
        last + 0.8, low + 0.55 * (high - low), f"steps {first} to {last} are done twice", fontsize=NORMAL
    )
    axes.set_xlabel("step", fontsize=NORMAL)
    axes.set_title("loss (nats a token)", loc="left", fontsize=NORMAL)
    axes.set_ylim(top=high + 0.5 * (high - low))
    axes.legend(frameon=False, fontsize=NORMAL, loc="upper right")
    quiet(axes, grid="y")
    return write(figure, path)


def draw_stalls(
    loops: Mapping[str, Sequence[tuple[float, float, float]]], title: str, path: str | Path
) -> Path:
    """Draw training loops below each other: computing in blue, stalled in orange; return the path.

    loops  name -> (start, end of computing, end of the stall) of each step, in seconds
    """
    figure = new_figure(9, 1.9)
    axes = figure.subplots()
    for row, spans in enumerate(loops.values()):
        origin = spans[0][0]
        for began, worked, end in spans:
            axes.broken_barh(
                [(began - origin, worked - began)], (row, 0.8), facecolor=BLUE, edgecolor="white"
            )
            axes.broken_barh([(worked - origin, end - worked)], (row, 0.8), facecolor=ORANGE)
    axes.set(xlim=(0, None), ylim=(len(loops) - 0.1, -0.1))
    axes.set_xlabel("seconds", fontsize=NORMAL)
    axes.set_title(title, loc="left", fontsize=NORMAL)
    _rows(axes, list(loops))
    return write(figure, path)


def draw_goodput(
    minutes: Sequence[float], curves: Sequence[tuple[str, Sequence[float], Sequence[float], float]], title: str,
    path: str | Path,
) -> Path:  # fmt: skip
    """Draw goodput against the minutes between saves; return the path.

    curves  (label, simulated goodput, goodput by formula, the formula's best interval in minutes)
    """
    figure = new_figure(8, 3.4)
    axes = figure.subplots()
    for (label, simulated, formula, best), colour, below in zip(curves, (BLUE, GREEN), (True, False)):
        axes.plot(minutes, simulated, color=colour, label=f"{label}: simulated")
        axes.plot(minutes, formula, color=colour, linestyle=(0, (3, 2)), linewidth=1, label="by formula")
        nearest = min(range(len(minutes)), key=lambda i: abs(minutes[i] - best))
        axes.plot([best], [simulated[nearest]], "o", color=colour)
        style: Style = dict(textcoords="offset points", ha="center", fontsize=SMALL, color=INK)
        axes.annotate(
            f"sqrt(2CM) = {best:.0f} min", (best, simulated[nearest]), (0, -16 if below else 8), **style
        )
    axes.set_xscale("log")
    axes.set_xticks([2, 5, 10, 30, 60, 180, 360], ["2", "5", "10", "30", "60", "180", "360"])
    axes.minorticks_off()
    axes.set(ylim=(0, 1.05))
    axes.set_xlabel("minutes of work between saves", fontsize=NORMAL)
    axes.set_title(title, loc="left", fontsize=NORMAL)
    axes.legend(frameon=False, fontsize=SMALL, loc="lower center")
    quiet(axes, grid="y")
    return write(figure, path)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks([row + 0.4 for row in range(len(names))], names)
    quiet(axes)
    axes.tick_params(axis="y", labelsize=NORMAL, length=0)
