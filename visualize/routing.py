"""The loss, the dropped choices and the bytes of small mixtures of experts, for each value of four routing options.

    python -m minipar.visualize.routing [--runs benchmarks/guide/routing.toml] [--out docs/generated/routing.png]

`benchmarks.guide.routing` measures the runs, and docs/generated/routing.md shows them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from minipar.config.check_paths import require_picture
from minipar.visualize.style import BLUE, GREEN, INK, NORMAL, SMALL, VERMILION, new_figure, quiet, write

BARS = {
    "drops": ("dropped choices", VERMILION, "{:.1%}"),
    "kilobytes": ("kB a step over ep", GREEN, "{:,.0f}"),
}


class Routed(NamedTuple):
    """Means over the seeds of a setting: held-out loss, the share of choices dropped, and kB that a rank sends over ep.

    lowest, highest   held-out loss, over the seeds
    drops, kilobytes  per step, over its last steps
    """

    panel: str
    label: str
    loss: float
    lowest: float
    highest: float
    drops: float
    kilobytes: float


def draw_routing(runs: Sequence[Routed], path: str | Path) -> Path:
    """Write `routing_figure` to a .png, .svg or .pdf; return the path."""
    return write(routing_figure(runs), path)


def routing_figure(runs: Sequence[Routed]) -> Figure:
    """Draw one column per option: the mean loss as a dot, its range over the seeds as a line; drops and bytes as bars."""
    if not runs:
        raise ValueError("no runs to draw; give at least one")
    panels: dict[str, list[Routed]] = {}
    for run in runs:
        panels.setdefault(run.panel, []).append(run)
    figure = new_figure(max(3.0, 2.4 * len(panels)), 5.4)
    widths = [len(of_panel) + 0.6 for of_panel in panels.values()]
    axes = figure.subplots(3, len(panels), squeeze=False, sharey="row", sharex="col", width_ratios=widths)
    for column, (panel, of_panel) in enumerate(panels.items()):
        places = range(len(of_panel))
        top = axes[0, column]
        top.set_title(panel, loc="left", fontsize=NORMAL)
        top.vlines(
            places, [r.lowest for r in of_panel], [r.highest for r in of_panel], color=INK, linewidth=1.2
        )
        top.plot(places, [r.loss for r in of_panel], "o", color=BLUE)
        for place, run in zip(places, of_panel):
            where = (place, run.highest)
            top.annotate(
                f"{run.loss:.2f}", where, (0, 6), textcoords="offset points", ha="center", fontsize=SMALL
            )
        for row, (key, (_, colour, form)) in enumerate(BARS.items(), 1):
            bars = axes[row, column].bar(places, [getattr(r, key) for r in of_panel], color=colour, width=0.7)
            labels = [form.format(getattr(r, key)) for r in of_panel]
            axes[row, column].bar_label(bars, labels, fontsize=SMALL, padding=1)
        axes[2, column].set_xticks(places, [r.label for r in of_panel], rotation=25, fontsize=SMALL)
        for each in axes[:, column]:
            quiet(each)
            each.set_xlim(-0.6, len(of_panel) - 0.4)
    for row, name in enumerate(["held-out loss", *(name for name, _, _ in BARS.values())]):
        axes[row, 0].set_ylabel(name, fontsize=NORMAL)
    low, high = min(r.lowest for r in runs), max(r.highest for r in runs)
    margin = 0.02 + 0.15 * (high - low)
    axes[0, 0].set_ylim(low - margin, high + 2 * margin)
    for row, key in enumerate(BARS, 1):
        axes[row, 0].set_ylim(0, 1.2 * max(1e-3, *(getattr(r, key) for r in runs)))
    axes[1, 0].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return figure


def main(runs: Path = Path("benchmarks/guide/routing.toml"), out: Path = Path("runs/routing.png")) -> None:
    """Draw runs in which one routing option was changed at a time.

    Args:
        runs: the file that `benchmarks.guide.routing` writes.
        out: a .png, .svg or .pdf.
    """
    require_picture("out", out)
    measured = tomllib.loads(runs.read_text(encoding="utf-8"))["run"]
    print(f"wrote {draw_routing([Routed(**run) for run in measured], out)}")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main, prog="python -m minipar.visualize.routing")
    except ValueError as error:
        raise SystemExit(f"minipar.visualize.routing: {error}") from None
