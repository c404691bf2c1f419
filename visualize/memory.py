"""A picture of a rank's memory between two steps: parameters, gradients, optimizer state, and their total by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minipar.visualize.style import (
    BLUE,
    GREEN,
    INK,
    NORMAL,
    ORANGE,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    text_on,
    write,
)

COLOURS = (BLUE, ORANGE, GREEN, VERMILION)


class Bar(NamedTuple):
    """The bytes that a rank holds under one way of training.

    held     measured bytes by kind, from the bottom up
    formula  expected total bytes, or None
    """

    name: str
    held: Mapping[str, float]
    formula: float | None = None


def draw_memory(
    bars: Sequence[Bar], path: str | Path, what: str = "held by a rank", line: str = "formula"
) -> Path:
    """Write `memory_figure` to a .png, .svg or .pdf; return the path."""
    return write(memory_figure(bars, what, line), path)


def memory_figure(bars: Sequence[Bar], what: str = "held by a rank", line: str = "formula") -> Figure:
    """Draw a stacked bar per `Bar` (or equal tuple), with its total above it and a line at the formula's value.

    what  the title after the unit, as in "GB held by a rank"
    line  the name of what the dashed lines mark
    """
    bars = [Bar(*bar) for bar in bars]
    kinds = list(dict.fromkeys(kind for bar in bars for kind in bar.held))
    if not kinds or len(kinds) > len(COLOURS):
        raise ValueError(f"bars hold {len(kinds)} kinds of bytes; use 1 to {len(COLOURS)}")
    colour_of = dict(zip(kinds, COLOURS))
    figure = new_figure(2.6 + 1.2 * len(bars), 3.6)
    axes = figure.subplots()
    unit, unit_bytes = _unit(max(sum(bar.held.values()) for bar in bars))
    tallest = max(max(sum(bar.held.values()), bar.formula or 0) for bar in bars) / unit_bytes
    for x, bar in enumerate(bars):
        _draw_bar(axes, x, bar, colour_of, unit_bytes, tallest)
    axes.set(xticks=range(len(bars)), xlim=(-0.6, len(bars) - 0.4), ylim=(0, 1.1 * tallest))
    axes.set_xticklabels([bar.name for bar in bars], fontsize=NORMAL)
    axes.set_title(f"{unit} {what}", loc="left", fontsize=NORMAL)
    handles: list[Artist] = [Patch(facecolor=colour_of[kind], label=kind) for kind in reversed(kinds)]
    if any(bar.formula is not None for bar in bars):
        handles.append(Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (3, 2)), label=line))
    figure.legend(handles=handles, fontsize=NORMAL, frameon=False, loc="outside right upper")
    quiet(axes, grid="y")
    return figure


def _draw_bar(
    axes: Axes, x: int, bar: Bar, colour_of: Mapping[str, str], unit_bytes: int, tallest: float
) -> None:
    bottom = 0.0
    for kind, num_bytes in bar.held.items():
        height = num_bytes / unit_bytes
        axes.bar(x, height, 0.62, bottom, color=colour_of[kind], edgecolor="white", linewidth=0.6)
        if height > 0.05 * tallest:
            style: Style = dict(ha="center", va="center", fontsize=SMALL, color=text_on(colour_of[kind]))
            axes.text(x, bottom + height / 2, f"{height:.3g}", **style)
        bottom += height
    top = max(bottom, (bar.formula or 0) / unit_bytes)
    axes.text(x, top + 0.015 * tallest, f"{bottom:.3g}", ha="center", va="bottom", fontsize=NORMAL, color=INK)
    if bar.formula is not None:
        axes.hlines(
            bar.formula / unit_bytes, x - 0.4, x + 0.4, color=INK, linewidth=1.4, linestyle=(0, (3, 2))
        )


def _unit(num_bytes: float) -> tuple[str, int]:
    return next(
        (name, size)
        for name, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))
        if num_bytes >= size
    )
