"""Pictures of tensor parallelism: what a rank holds at each point of a layer, and what each cut of a matrix costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from minipar.extras.tensor_grids import linear_costs
from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LARGE,
    NORMAL,
    PURPLE,
    RANKS,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    write,
)


class Point(NamedTuple):
    """A point of a layer: how the activation is split there, and the collectives just before it.

    holds  what a rank has: "whole"; its part of the "features" or "tokens"; or a "term", a partial sum of the whole shape
    """

    name: str
    holds: str
    forward: str = ""
    backward: str = ""


def layer_points(sequence_parallel: bool) -> list[Point]:
    """Return the points of one layer, in order."""
    between = "tokens" if sequence_parallel else "whole"
    enter = ("all-gather", "reduce-scatter") if sequence_parallel else ("", "all-reduce")
    leave = ("reduce-scatter", "all-gather") if sequence_parallel else ("all-reduce", "")
    points = []
    for norm, middle, inside, out in (
        ("attention\nnorm", "q, k, v", "attention", "o"),
        ("mlp\nnorm", "gate, up", "silu * up", "down"),
    ):
        points += [
            Point(norm, between),
            Point(middle, "features", *enter),
            Point(inside, "features"),
            Point(out, "term"),
            Point("sum,\n+ residual", between, *leave),
        ]
    return points


def draw_layer(tp: int, path: str | Path, sequence_parallel: bool = False) -> Path:
    """Draw what each of tp ranks holds at each point of a layer, and where they communicate; return the path.

    Each box is the activation, tokens down and features across; the part that the rank holds is coloured. A hatched box
    is a partial sum: the whole shape, but only this rank's summand.
    """
    points = layer_points(sequence_parallel)
    figure = new_figure(1.05 * len(points) + 0.8, 0.72 * tp + 1.8)
    axes = figure.subplots()
    for column, point in enumerate(points):
        axes.text(column + 0.4, -0.12, point.name, ha="center", va="bottom", fontsize=SMALL)
        for rank in range(tp):
            _draw_part(axes, column, rank, point.holds, tp)
        _draw_collectives(axes, column, tp, point)
    axes.set(xlim=(-0.7, len(points)), ylim=(tp + 0.75, -0.75))
    axes.set_yticks(
        [rank + 0.35 for rank in range(tp)], [f"rank {rank}" for rank in range(tp)], fontsize=SMALL
    )
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = "tensor and sequence parallelism" if sequence_parallel else "tensor parallelism"
    figure.suptitle(f"one layer under {title}: what each rank holds", fontsize=LARGE)
    _draw_layer_legend(figure)
    return write(figure, path)


def _draw_layer_legend(figure: Figure) -> None:
    outline: Style = dict(edgecolor=GREY, linewidth=0.6)
    arrow: Style = dict(linestyle="", markersize=11)
    handles: list[Artist] = [
        Patch(facecolor=GREY, label="held by this rank"),
        Patch(
            facecolor="white",
            hatch="////",
            edgecolor=GREY,
            linewidth=0,
            label="partial sum: this rank's summand",
        ),
        Patch(facecolor="white", label="held by other ranks", **outline),
        Line2D([], [], color=BLUE, marker="$\\rightarrow$", label="sent in the forward", **arrow),
        Line2D([], [], color=VERMILION, marker="$\\leftarrow$", label="sent in the backward", **arrow),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=SMALL, frameon=False)


def _draw_part(axes: Axes, column: int, rank: int, holds: str, tp: int) -> None:
    x, y, width, height = column + 0.08, rank + 0.04, 0.64, 0.62
    axes.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor=GREY, linewidth=0.6))
    if holds == "features":
        x, width = x + rank * width / tp, width / tp
    elif holds == "tokens":
        y, height = y + rank * height / tp, height / tp
    colour = RANKS[rank % len(RANKS)]
    hatched: Style = dict(facecolor=colour)
    if holds == "term":
        hatched = dict(facecolor="white", hatch="////", edgecolor=colour)
    axes.add_patch(Rectangle((x, y), width, height, linewidth=0, **hatched))


def _draw_collectives(axes: Axes, column: int, tp: int, point: Point) -> None:
    """Draw the collectives just before this point, the forward's and the backward's, below the column."""
    middle = column - 0.1
    if point.forward or point.backward:
        axes.plot([middle, middle], [-0.05, tp], color=INK, linewidth=0.9, linestyle=":")
    if point.forward:
        axes.text(
            middle, tp + 0.1, f"{point.forward} \u2192", ha="center", va="top", fontsize=SMALL, color=BLUE
        )
    if point.backward:
        axes.text(
            middle,
            tp + 0.4,
            f"\u2190 {point.backward}",
            ha="center",
            va="top",
            fontsize=SMALL,
            color=VERMILION,
        )


def draw_layouts(m: int, d: int, f: int, path: str | Path, powers: Sequence[int] = range(1, 5)) -> Path:
    """Plot what a rank of an MLP D -> F -> D sends and holds for M rows, cut in 1, 2 or 3 dims, on 4^n and 8^n ranks."""
    squares, cubes = [4**n for n in powers], [8**n for n in powers if 8**n <= 4 ** max(powers)]
    lines = {
        "1D": (squares, (linear_costs.column_cost, linear_costs.row_cost), VERMILION),
        "2D": (squares, (linear_costs.summa_cost, linear_costs.summa_cost), BLUE),
        "2.5D, depth 4": ([t for t in squares if t >= 16], (_deep, _deep), PURPLE),
        "3D": (cubes, (linear_costs.cube_cost, linear_costs.cube_cost), GREEN),
    }
    figure = new_figure(7.5, 3.2)
    left, right = figure.subplots(1, 2)
    for name, (ranks, layers, colour) in lines.items():
        costs = [linear_costs.mlp_cost(*layers, t, m, d, f) for t in ranks]
        for axes, values in ((left, [c.sent for c in costs]), (right, [c.held for c in costs])):
            axes.plot(
                ranks, [float(v) for v in values], "o-", color=colour, label=name, markersize=3, linewidth=1.2
            )
    for axes, title in ((left, "sent, forward and backward"), (right, "weights and activations held")):
        axes.set_title(title, loc="left", fontsize=NORMAL)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(squares, [str(t) for t in squares])
        axes.tick_params(which="minor", labelsize=SMALL)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("ranks", fontsize=SMALL)
        quiet(axes, grid="both")
    left.set_ylabel("elements a rank", fontsize=SMALL)
    left.legend(fontsize=SMALL, frameon=False)
    figure.suptitle(f"an MLP {d} \u2192 {f} \u2192 {d} of {m:,} rows", fontsize=LARGE)
    return write(figure, path)


def _deep(t: int, m: int, d_in: int, d_out: int) -> linear_costs.Cost:
    return linear_costs.summa_cost(t, m, d_in, d_out, depth=4)


def draw_kept(parts: dict[str, dict[str, float]], path: str | Path, title: str = "") -> Path:
    """Draw a stacked bar for each way to run a layer: the activation bytes kept per rank, by kind, and their sum."""
    kinds = list(dict.fromkeys(kind for by_kind in parts.values() for kind in by_kind))
    figure = new_figure(1.3 * len(parts) + 2.2, 3.0)
    axes = figure.subplots()
    colours = (VERMILION, BLUE, GREEN, PURPLE, FAINT)
    bottom = dict.fromkeys(parts, 0.0)
    for kind, colour in zip(kinds, colours):
        heights = [by_kind.get(kind, 0.0) / 1e6 for by_kind in parts.values()]
        axes.bar(list(parts), heights, 0.6, list(bottom.values()), color=colour, label=kind)
        bottom = {name: bottom[name] + height for name, height in zip(bottom, heights)}
    for x, total in enumerate(bottom.values()):
        axes.text(x, total, f"{total:.2f}", ha="center", va="bottom", fontsize=SMALL)
    axes.set_title(title, loc="left", fontsize=NORMAL)
    axes.set_ylabel("MB per rank and layer", fontsize=SMALL)
    axes.legend(fontsize=SMALL, frameon=False, loc="upper right")
    quiet(axes, grid="y")
    return write(figure, path)
