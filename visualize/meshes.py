"""The losses on several meshes and in one process, and their differences: the picture in the README.

    python -m minipar.visualize.meshes [--steps 24] [--out runs/meshes.png]

Every run has the same seed, batches and model, in float64. One run averages only the signs of gradients, which loses
information, to show what a real difference looks like.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.config.check_paths import require_picture
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig
from minipar.runtime.launch import shutdown
from minipar.support.errors import require_positive
from minipar.train import train
from minipar.train.data.text import load_text
from minipar.train.reference import train_in_one_process
from minipar.visualize.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LARGE,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    new_figure,
    quiet,
    write,
)

MESHES: dict[str, dict[str, Any]] = {
    "data parallel, ZeRO-3: 4 ranks": dict(dp=4, zero=3),
    "tensor parallel: 4 ranks": dict(tp=4, sequence_parallel=True),
    "pipeline, zero bubble: 4 ranks": dict(pp=4, microbatches=8, schedule="zb-h1"),
    "context parallel: 4 ranks": dict(cp=4),
    "data x tensor x pipeline: 8 ranks": dict(dp=2, tp=2, pp=2, microbatches=4, zero=1),
}
LOSSY: dict[str, dict[str, Any]] = {"gradients sent as signs, lossy: 4 ranks": dict(dp=4, compress="sign")}
COLOURS = (SKY, ORANGE, GREEN, PURPLE, BLUE, VERMILION)
MARKERS = "osD^v"
LEAST = 1e-17  # drawn for a difference of 0, which has no logarithm


def config_of(mesh: Mapping[str, Any], steps: int) -> TrainConfig:
    return replace(VERIFY_DEFAULTS, steps=steps, lr=3e-3, verify_steps=0, **mesh)


def losses_of(mesh: Mapping[str, Any], steps: int) -> list[float]:
    """Return the loss of each step on this mesh, on local ranks."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(replace(config_of(mesh, steps), out=Path(folder) / "run"))
    assert result is not None  # only torchrun's other ranks get None
    return [step["loss"] for step in result.metrics]


def losses_of_one_process(steps: int) -> list[float]:
    """Return the loss of each step of the unmodified model in a plain loop."""
    config = config_of({}, steps)
    return train_in_one_process(config, load_text(config.text), steps).losses


def meshes_figure(reference: Sequence[float], losses: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the losses and, below them, each run's difference from `reference`, on a logarithmic axis.

    losses  name -> the loss of each step
    """
    if not losses:
        raise ValueError("no meshes to draw; give the losses of at least one")
    figure = new_figure(9.5, 5.0)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_losses(above, reference, losses)
    for (name, own), colour in zip(losses.items(), COLOURS):
        apart = [max(abs(a - b), LEAST) for a, b in zip(own, reference)]
        below.semilogy(apart, color=colour, linewidth=1.4, linestyle="--" if name in LOSSY else "-")
    below.set_title("difference from one process", loc="left", fontsize=NORMAL)
    below.set_ylim(LEAST, 10)
    below.set_yticks([1e-15, 1e-10, 1e-5, 1])
    below.set_xlabel("step", fontsize=SMALL)
    quiet(below, grid="y")
    return figure


def _draw_losses(axes: Axes, reference: Sequence[float], losses: Mapping[str, Sequence[float]]) -> None:
    """Draw one process as a line, and each run as marks, at different steps for each run so that no mark hides another."""
    axes.plot(reference, color=INK, linewidth=1.2, label="one process", zorder=1)
    exact = [name for name in losses if name not in LOSSY]
    for number, (name, colour) in enumerate(zip(losses, COLOURS)):
        if name in LOSSY:
            axes.plot(losses[name], "--", color=colour, linewidth=1.2, label=name, zorder=0)
            continue
        steps = range(number, len(reference), len(exact))
        marks = [losses[name][step] for step in steps]
        axes.plot(steps, marks, MARKERS[number], color=colour, markeredgecolor=GREY, markeredgewidth=0.5,
                  markersize=6, label=name, zorder=2)  # fmt: skip
    axes.set_title("loss (nats a token): one model, one seed, one batch", loc="left", fontsize=LARGE)
    axes.legend(fontsize=NORMAL, frameon=False)
    quiet(axes, grid="y")


def main(steps: int = 24, out: Path = Path("runs/meshes.png")) -> None:
    """Train on several meshes and on one process, and draw their losses.

    Args:
        steps: optimizer steps of each run.
        out: a .png, .svg or .pdf.
    """
    require_positive(steps=steps)
    require_picture("out", out)
    reference, losses = losses_of_one_process(steps), {}
    for name, mesh in (MESHES | LOSSY).items():
        losses[name] = losses_of(mesh, steps)
        apart = max(abs(a - b) for a, b in zip(losses[name], reference))
        print(f"{name:42} largest difference in loss {apart:.1e}", flush=True)
    shutdown()
    print(f"wrote {write(meshes_figure(reference, losses), out)}")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main, prog="python -m minipar.visualize.meshes")
    except ValueError as error:
        raise SystemExit(f"minipar.visualize.meshes: {error}") from None
