"""A picture of a training run: loss, learning rate and throughput, and the losses of reference runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.visualize.style import (
    BLUE,
    GREEN,
    GREY,
    LARGE,
    NORMAL,
    ORANGE,
    SMALL,
    VERMILION,
    new_figure,
    quiet,
    write,
)


def draw_training(
    metrics: Sequence[Mapping[str, float]],
    path: str | Path,
    reference: Mapping[str, Sequence[float]] | None = None,
) -> Path:
    """Write `training_figure` to a .png, .svg or .pdf; return the path."""
    return write(training_figure(metrics, reference), path)


def training_figure(
    metrics: Sequence[Mapping[str, float]], reference: Mapping[str, Sequence[float]] | None = None
) -> Figure:
    """Draw the loss over steps and, below it, tokens per second and the learning rate.

    metrics    one mapping per step, with `step` and `loss`, and where known `tokens_per_s`, `lr`, `eval_loss`
    reference  name -> losses of another run from the first step on, drawn as circles around this run's losses
    """
    if not metrics:
        raise ValueError("no metrics to draw; give those of at least one step")
    extra = [(key, name) for key, name in _PANELS.items() if key in metrics[0]]
    figure = new_figure(9.0, 4.0 + (1.7 if extra else 0))
    areas = figure.subfigures(2, 1, height_ratios=(4.0, 1.7), squeeze=False)[:, 0] if extra else [figure]
    _draw_loss(areas[0].subplots(), metrics, reference or {})
    for area in areas[1:]:
        for axes, (key, (name, colour)) in zip(area.subplots(1, len(extra), squeeze=False)[0], extra):
            axes.plot([m["step"] for m in metrics], [m[key] for m in metrics], color=colour, linewidth=1.2)
            axes.set_title(name, loc="left", fontsize=NORMAL)
            axes.set_ylim(0, 1.1 * max(m[key] for m in metrics))
            axes.yaxis.set_major_formatter("{x:,g}")
            quiet(axes, grid="y")
    return figure


_PANELS = {"tokens_per_s": ("tokens a second", GREEN), "lr": ("learning rate", ORANGE)}


def _draw_loss(
    axes: Axes, metrics: Sequence[Mapping[str, float]], reference: Mapping[str, Sequence[float]]
) -> None:
    steps, losses = [m["step"] for m in metrics], [m["loss"] for m in metrics]
    axes.plot(steps, losses, color=BLUE, linewidth=1.6, label="this run", zorder=2)
    measured = [(m["step"], m["eval_loss"]) for m in metrics if "eval_loss" in m]
    if measured:
        axes.plot(
            *zip(*measured), "s-", color=ORANGE, linewidth=1, markersize=4, label="on text held out", zorder=3
        )
    for (name, others), colour in zip(reference.items(), (VERMILION, GREY)):
        largest = max((abs(a - b) for a, b in zip(losses, others)), default=0.0)
        label = f"{name} (largest difference in loss {largest:.1e})"
        axes.plot(
            steps[: len(others)],
            others,
            "o",
            color=colour,
            fillstyle="none",
            markersize=5,
            label=label,
            zorder=3,
        )
    for step, loss, offset in ((steps[0], losses[0], (6, 2)), (steps[-1], losses[-1], (6, -3))):
        axes.annotate(
            f"{loss:.3f}", (step, loss), offset, textcoords="offset points", fontsize=NORMAL, color=BLUE
        )
    axes.set_xlabel("step", fontsize=SMALL)
    axes.set_title("loss (nats a token)", loc="left", fontsize=LARGE)
    axes.margins(x=0.06, y=0.1)
    if reference or measured:
        axes.legend(fontsize=NORMAL, frameon=False)
    quiet(axes, grid="y")
