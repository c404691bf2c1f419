"""Pictures of a sequence split over ranks: which rank computes which scores, and how much work each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipar.config.context_limits import LAYOUTS
from minipar.context.token_layout import local_positions, local_runs
from minipar.model.mask import Mask
from minipar.visualize.style import (
    FAINT,
    INK,
    LARGE,
    NORMAL,
    RANKS,
    SMALL,
    Style,
    new_figure,
    quiet,
    text_on,
    write,
)

SEEN_BY_NOBODY = "#ffffff"


def draw_balance(path: str | Path, size: int = 4, layouts: Sequence[str] = LAYOUTS) -> Path:
    """Write `balance_figure` to a .png, .svg or .pdf; return the path."""
    return write(balance_figure(size, layouts), path)


def balance_figure(size: int = 4, layouts: Sequence[str] = LAYOUTS) -> Figure:
    """Draw, for each layout, the causal score matrix, coloured by the rank that computes a score, and each rank's work.

    Below the matrix, each bar is a rank. Its pieces are the steps of the ring, coloured by the rank whose keys are used in
    that step; the unit is a whole block of N/P queries by N/P keys. Attention takes as long as the longest bar.
    """
    if not 1 <= size <= len(RANKS):
        raise ValueError(f"size={size} ranks have no colours of their own; use 1 to {len(RANKS)}")
    figure = new_figure(4.2 * len(layouts), 5.4 + 0.12 * size)
    axes = figure.subplots(2, len(layouts), squeeze=False, height_ratios=(3.2, 0.36 * size))
    longest = max(sum(work) for layout in layouts for work in work_in_blocks(size, layout))
    for layout, matrix, bars in zip(layouts, *axes):
        _draw_matrix(matrix, size, layout)
        _draw_work(bars, size, layout, longest)
    axes[0, 0].set_ylabel("queries", fontsize=NORMAL)
    handles = [Patch(facecolor=RANKS[r], label=f"rank {r}") for r in range(size)]
    style: Style = dict(
        loc="outside lower center", ncols=size, fontsize=NORMAL, title_fontsize=NORMAL, frameon=False
    )
    figure.legend(handles=handles, title="above: whose queries, below: whose keys", **style)
    return figure


def work_in_blocks(size: int, layout: str, tokens: int = 512) -> list[list[float]]:
    """Return [rank][step]: the scores that a rank computes in a step of the ring, in blocks of `tokens` by `tokens`."""
    N = size * tokens
    runs = [local_runs(N, r, size, layout) for r in range(size)]
    return [
        [Mask(runs[r], runs[(r - step) % size]).count() / tokens**2 for step in range(size)]
        for r in range(size)
    ]


def _draw_matrix(axes: Axes, size: int, layout: str) -> None:
    N = 12 * size
    owner = np.empty(N, dtype=int)
    for rank in range(size):
        owner[local_positions(N, rank, size, layout).numpy()] = rank
    cells = np.where(np.tri(N, dtype=bool), owner[:, None], -1)
    colours = ListedColormap([SEEN_BY_NOBODY, *RANKS[:size]])
    axes.imshow(cells, cmap=colours, vmin=-1, vmax=size - 1, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel("keys", fontsize=NORMAL)
    axes.set_title(layout, fontsize=LARGE, loc="left")
    for spine in axes.spines.values():
        spine.set_color(FAINT)


def _draw_work(axes: Axes, size: int, layout: str, longest: float) -> None:
    work = work_in_blocks(size, layout)
    for rank, steps in enumerate(work):
        start = 0.0
        for step, blocks in enumerate(steps):
            colour = RANKS[(rank - step) % size]
            axes.barh(rank, blocks, left=start, height=0.78, color=colour, edgecolor="white", linewidth=0.6)
            if blocks > 0.2:
                middle = start + blocks / 2
                style: Style = dict(ha="center", va="center", fontsize=SMALL, color=text_on(colour))
                axes.text(middle, rank, f"{blocks:.2g}", **style)
            start += blocks
    slowest = max(map(sum, work))
    axes.axvline(slowest, color=INK, linewidth=0.9, linestyle=":")
    axes.set(xlim=(0, longest * 1.02), ylim=(size - 0.5, -0.5), yticks=range(size))
    axes.set_yticklabels([f"rank {r}" for r in range(size)], fontsize=SMALL)
    axes.set_xlabel(f"blocks computed: {slowest:.2f} on the slowest rank", fontsize=NORMAL)
    quiet(axes)
