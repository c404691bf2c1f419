"""The style that all pictures share: colours distinct in every kind of colour vision, plain axes, and file writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's hues. RANKS orders them so that consecutive colours differ in lightness too.
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
VERMILION, PURPLE, YELLOW, GREY = "#d55e00", "#cc79a7", "#f0e442", "#9a9a9a"
RANKS = (SKY, VERMILION, YELLOW, BLUE, PURPLE, GREEN, ORANGE, GREY)
INK, FAINT = "#222222", "#dcdcdc"
Style = dict[str, Any]  # keyword arguments of matplotlib's
# Hatching and colours for waiting and bubbles.
IDLE: Style = {"facecolor": FAINT, "hatch": "////", "edgecolor": "#f4f4f4", "linewidth": 0}
SMALL, NORMAL, LARGE = 7.5, 9.0, 11.0  # font sizes


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return a figure that is not in pyplot's list of open figures, so that drawing changes no global state."""
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def quiet(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """Style the axes: no box, small ticks, and at most a faint grid along "x", "y" or "both"."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=SMALL, color=GREY, length=3)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def write(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format that the suffix names (.png, .svg, .pdf), without a date; return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def text_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on this colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
