"""Pictures of a mixture of experts: tokens kept and dropped under a capacity, and the experts' loads during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minipar.model.aux_loss import MoEMetrics
from minipar.visualize.style import (
    GREY,
    IDLE,
    INK,
    LARGE,
    NORMAL,
    RANKS,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    text_on,
    write,
)

Choices = Sequence[Sequence[int]]  # the experts of each token


def draw_queues(
    expert: Choices, kept: Sequence[Sequence[bool]], capacity: int, path: str | Path, **options: Any
) -> Path:
    """Write `queue_figure` to a .png, .svg or .pdf; return the path."""
    return write(queue_figure(expert, kept, capacity, **options), path)


def queue_figure(
    expert: Choices,
    kept: Sequence[Sequence[bool]],
    capacity: int,
    num_experts: int | None = None,
    title: str = "",
) -> Figure:
    """Draw the experts' queues of one routing group: one row per expert, one box per token, in the order of the tokens.

    expert, kept  [T][k]: each token's choices, and whether each was kept
    capacity      number of tokens an expert keeps; dropped tokens are drawn to the right of the line, hatched
    """
    num_experts = num_experts or max(max(row) for row in expert) + 1
    figure = new_figure(9.0, 0.6 + 0.45 * num_experts)
    axes = figure.subplots()
    served, turned_away = [0] * num_experts, [0] * num_experts
    for token, (choices, fit) in enumerate(zip(expert, kept)):
        for e, fits in zip(choices, fit):
            place = served[e] if fits else capacity + 0.3 + turned_away[e]
            (served if fits else turned_away)[e] += 1
            _box(axes, place, e, str(token), RANKS[e % len(RANKS)] if fits else None)
    for e in range(num_experts):
        for place in range(served[e], capacity):
            _box(axes, place, e, "", "#ffffff")
    axes.axvline(capacity + 0.1, color=INK, linewidth=1.2)
    axes.set_xlim(-0.1, capacity + 0.4 + max(1, max(turned_away)))
    axes.set_ylim(num_experts - 0.4, -0.6)
    axes.set_yticks(range(num_experts), [f"expert {e}" for e in range(num_experts)], fontsize=SMALL)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title or f"capacity {capacity}: what comes later is dropped", loc="left", fontsize=NORMAL)
    return figure


def _box(axes: Axes, place: float, row: int, text: str, colour: str | None) -> None:
    look: Style = IDLE if colour is None else {"facecolor": colour, "edgecolor": GREY, "linewidth": 0.6}
    axes.add_patch(Rectangle((place + 0.05, row - 0.38), 0.9, 0.76, **look))
    ink = INK if colour is None else text_on(colour)
    axes.text(place + 0.5, row, text, ha="center", va="center", fontsize=SMALL, color=ink)


def draw_loads(runs: Mapping[str, Sequence[MoEMetrics]], path: str | Path, aim: float = 0.02) -> Path:
    """Write `load_figure` to a .png, .svg or .pdf; return the path."""
    return write(load_figure(runs, aim), path)


def load_figure(runs: Mapping[str, Sequence[MoEMetrics]], aim: float = 0.02) -> Figure:
    """Draw, for each run, the experts' shares of all choices over steps and, below, the fraction of choices dropped.

    runs  name -> the `MoEMetrics` of one layer, one per step
    aim   the target fraction of dropped choices, drawn as a dotted line
    """
    if not runs or not all(len(steps) for steps in runs.values()):
        raise ValueError("no metrics to draw; give at least one run with one step")
    figure = new_figure(9.0, 4.4)
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False, height_ratios=(2.2, 1))
    for column, (name, steps) in enumerate(runs.items()):
        _draw_shares(axes[0, column], steps)
        axes[0, column].set_title(name, loc="left", fontsize=LARGE)
        _draw_drops(axes[1, column], steps, aim)
    axes[0, 0].set_ylabel("shares of the experts 0, 1, ...", fontsize=NORMAL)
    axes[1, 0].set_ylabel("dropped", fontsize=NORMAL)
    return figure


def _draw_shares(axes: Axes, steps: Sequence[MoEMetrics]) -> None:
    shares = [[float(n) / max(1, int(m.load.sum())) for n in m.load] for m in steps]
    num_experts = len(shares[0])
    colours = [RANKS[e % len(RANKS)] for e in range(num_experts)]
    axes.stackplot(range(len(steps)), list(zip(*shares)), colors=colours, edgecolor="white", linewidth=0.3)
    for e in range(1, num_experts):  # the borders under an even load
        axes.axhline(e / num_experts, color=INK, linewidth=0.5, linestyle=(0, (1, 3)))
    bottom = 0.0
    for e, share in enumerate(shares[-1]):  # number the experts where there is room
        if share > 0.05:
            style: Style = dict(ha="right", va="center", fontsize=SMALL, color=text_on(colours[e]))
            axes.text(len(steps) - 1, bottom + share / 2, f"{e} ", **style)
        bottom += share
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    quiet(axes)


def _draw_drops(axes: Axes, steps: Sequence[MoEMetrics], aim: float) -> None:
    axes.plot([m.drop_rate for m in steps], color=VERMILION, linewidth=1.2)
    axes.axhline(aim, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        f" aim: {aim:.0%}",
        (0, aim),
        xycoords=("axes fraction", "data"),
        fontsize=SMALL,
        ha="left",
        va="bottom",
    )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlim(0, max(1, len(steps) - 1))
    axes.set_xlabel("step", fontsize=NORMAL)
    quiet(axes, grid="y")
