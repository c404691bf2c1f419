"""Pictures of a mesh: which ranks form groups, what each axis sends, and what a step waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from minipar.mesh import Mesh
from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    NORMAL,
    ORANGE,
    PURPLE,
    RANKS,
    SMALL,
    VERMILION,
    new_figure,
    quiet,
    text_on,
    write,
)

AXIS_COLOURS = {"tp": BLUE, "gradients": ORANGE, "cp": GREEN, "pp": PURPLE}
AXIS_LABELS = {"gradients": "gradients (dp x cp)"}


def draw_groups(mesh: Mesh, words: Mapping[str, str], ranks_per_node: int, path: str | Path) -> Path:
    """Draw all ranks once per axis of `words` (axis -> what its groups do), one colour per group; return the path."""
    size = mesh.world_size
    figure = new_figure(9, 1.1 * len(words))
    for axes, (axis, what) in zip(figure.subplots(len(words), 1, squeeze=False)[:, 0], words.items()):
        for number, group in enumerate(sorted({mesh.group(rank, axis) for rank in range(size)})):
            colour = RANKS[number % len(RANKS)]
            for rank in group:
                x = rank + 0.6 * (rank // ranks_per_node)
                axes.add_patch(Rectangle((x + 0.05, 0), 0.9, 0.9, facecolor=colour))
                style = dict(ha="center", va="center", color=text_on(colour), fontsize=NORMAL)
                axes.text(x + 0.5, 0.45, rank, **style)
        axes.text(-0.3, 0.45, f"{axis} groups\n{what}", ha="right", va="center", fontsize=NORMAL)
        for node in range(-(-size // ranks_per_node)):
            left = (ranks_per_node + 0.6) * node
            box = Rectangle((left - 0.05, -0.12), ranks_per_node + 0.1, 1.14, fill=False, edgecolor=GREY)
            axes.add_patch(box)
            if axis == next(iter(words)):
                style = dict(ha="center", fontsize=NORMAL, color=GREY)
                axes.text(left + ranks_per_node / 2, 1.2, f"node {node}", **style)
        axes.set(xlim=(-0.3 * size, 1.05 * size), ylim=(-0.2, 1.6))
        axes.axis("off")
    return write(figure, path)


def draw_two_losses(good: Sequence[float], bad: Sequence[float], mistake: str, path: str | Path) -> Path:
    """Draw the losses by step of a correct run and of a run with a mistake; return the path."""
    figure = new_figure(7, 2.8)
    axes = figure.subplots()
    axes.plot(good, color=BLUE, label="right")
    axes.plot(bad, color=VERMILION, linestyle="--", label=mistake)
    axes.set_xlabel("step", fontsize=NORMAL)
    axes.set_title("both learn: loss in nats a token", loc="left", fontsize=NORMAL)
    axes.legend(frameon=False, fontsize=NORMAL)
    quiet(axes, grid="y")
    return write(figure, path)


def draw_axis_traffic(
    names: Sequence[str],
    sent: Sequence[Mapping[str, float]],
    formula: Sequence[Mapping[str, float]],
    path: str | Path,
) -> Path:
    """Draw the bytes that a rank sends in a step by axis: a group of bars per mesh, with lines at the formula's bytes.

    names          names of the meshes
    sent, formula  for each mesh: axis (tp, gradients, cp, pp) -> bytes; an axis that sends nothing has no bar
    """
    figure = new_figure(9, 3.4)
    axes = figure.subplots()
    tallest = max(max(bars.values()) for bars in sent) / 1e3
    for place, (bars, wanted) in enumerate(zip(sent, formula)):
        shown = [axis for axis in AXIS_COLOURS if bars[axis]]
        for i, axis in enumerate(shown):
            x, kb, want = place + 0.2 * (i - (len(shown) - 1) / 2), bars[axis] / 1e3, wanted[axis] / 1e3
            axes.bar(x, kb, 0.17, color=AXIS_COLOURS[axis])
            axes.hlines(want, x - 0.095, x + 0.095, color=INK, linewidth=1.4, linestyle=(0, (3, 2)))
            axes.text(x, max(kb, want) + 0.03 * tallest, f"{kb:.0f}", ha="center", fontsize=SMALL, color=INK)
    axes.set_ylim(0, 1.25 * tallest)
    axes.set_title("kB a rank sends in a step (dashed: the formula)", loc="left", fontsize=NORMAL)
    handles = [Patch(color=c, label=AXIS_LABELS.get(axis, axis)) for axis, c in AXIS_COLOURS.items()]
    axes.legend(handles=handles, frameon=False, fontsize=NORMAL, ncols=4, loc="upper left")
    quiet(axes, grid="y")
    axes.set_xticks(range(len(names)), names, fontsize=NORMAL)
    return write(figure, path)


def draw_step_parts(
    names: Sequence[str], parts: Sequence[Mapping[str, float]], title: str, path: str | Path
) -> Path:
    """Draw the seconds of a step as one stacked bar per layout, with the total above it; return the path.

    parts  for each layout: name of a part -> seconds, from the bottom up; all layouts have the same keys
    """
    figure = new_figure(7.5, 3.2)
    axes = figure.subplots()
    colours = dict(zip(parts[0], (FAINT, BLUE, ORANGE, VERMILION)))
    totals = [sum(bar.values()) for bar in parts]
    for x, (bar, total) in enumerate(zip(parts, totals)):
        bottom = 0.0
        for what, seconds in bar.items():
            axes.bar(x, seconds, 0.6, bottom, color=colours[what])
            bottom += seconds
        axes.text(x, total + 0.01 * max(totals), f"{total:.2f}", ha="center", fontsize=NORMAL)
    axes.set_ylim(0, 1.45 * max(totals))
    axes.set_title(title, loc="left", fontsize=NORMAL)
    handles = [Patch(color=colour, label=what) for what, colour in colours.items()]
    axes.legend(handles=handles, frameon=False, fontsize=NORMAL, loc="upper left")
    quiet(axes, grid="y")
    axes.set_xticks(range(len(names)), names, fontsize=NORMAL)
    return write(figure, path)
