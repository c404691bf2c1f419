"""Loss and dropped choices against the capacity factor: a small mixture trained once for each factor, and a picture.

    python -m minipar.visualize.capacity [--factors 0.5 1 1.25 2 None] [--steps 300] [--out runs/capacity.png]

Every run starts from the same weights and has the same batches; only the experts' capacity differs.
Source of the question: Switch Transformers, arXiv:2101.03961, table 1; ST-MoE, arXiv:2202.08906, table 8.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minipar.config.check_paths import require_picture
from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, take_metrics
from minipar.support.errors import require_positive
from minipar.train.data.text import batch_of_step, load_text
from minipar.train.optim import BETAS, clip_grad_norm_, learning_rate
from minipar.visualize.style import (
    BLUE,
    INK,
    LARGE,
    NORMAL,
    RANKS,
    SMALL,
    VERMILION,
    new_figure,
    quiet,
    write,
)

FACTORS = (0.5, 1.0, 1.25, 2.0, None)
LAST = 20  # a run's last loss is the mean over this many steps
MODEL = ModelConfig(dim=64, num_layers=2, num_heads=4, hidden_dim=88, max_seq_len=128, num_experts=8, top_k=1)
BATCH_SIZE, LR, WARMUP = 8, 3e-3, 20


class Run(NamedTuple):
    """A training with one capacity factor (None: no limit): per step, nats per token and the share of dropped choices."""

    factor: float | None
    losses: list[float]
    dropped: list[float]

    @property
    def name(self) -> str:
        return "room for all" if self.factor is None else f"{self.factor:g}"

    @property
    def last_loss(self) -> float:
        return statistics.mean(self.losses[-LAST:])

    @property
    def last_dropped(self) -> float:
        return statistics.mean(self.dropped[-LAST:])


def train_with(factor: float | None, steps: int, seed: int = 0) -> Run:
    """Train `MODEL`, with experts in its second layer, on the text that comes with Python, in this process."""
    model, text = Transformer(replace(MODEL, capacity_factor=factor), seed), load_text(None)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.1)
    losses, dropped = [], []
    for step in range(steps):
        batch = batch_of_step(text, seed, step, BATCH_SIZE, MODEL.max_seq_len)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, LR, WARMUP)
        optimizer.zero_grad()
        loss = model.loss(batch.tokens, batch.targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        (metrics,) = take_metrics(model).values()
        dropped.append(metrics.drop_rate)
    return Run(factor, losses, dropped)


def draw_capacity(runs: Sequence[Run], path: str | Path) -> Path:
    """Write `capacity_figure` to a .png, .svg or .pdf; return the path."""
    return write(capacity_figure(runs), path)


def capacity_figure(runs: Sequence[Run]) -> Figure:
    """Draw last loss and dropped share against the capacity factor and, beside it, each run's dropped share over steps."""
    if not runs or not all(run.losses for run in runs):
        raise ValueError("no runs to draw; give at least one run with one step")
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_ends(left, runs)
    for run, colour in zip(runs, RANKS * math.ceil(len(runs) / len(RANKS))):
        right.plot(run.dropped, color=colour, linewidth=0.9, label=run.name, clip_on=False)
    right.set_title("share of choices dropped", loc="left", fontsize=LARGE)
    right.set_xlabel("step", fontsize=NORMAL)
    right.margins(x=0.02)
    right.legend(title="capacity factor", fontsize=SMALL, title_fontsize=SMALL, frameon=False)
    for axes in figure.axes[1:]:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_ylim(bottom=0)
    quiet(right, grid="y")
    return figure


def _draw_ends(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw for each run a bar for the share dropped at the end and, in front of it, a point for the loss."""
    places = range(len(runs))
    shares = axes.twinx()
    shares.bar(places, [run.last_dropped for run in runs], width=0.5, color=VERMILION, alpha=0.35)
    axes.plot(places, [run.last_loss for run in runs], "o-", color=BLUE, linewidth=1.4)
    for place, run in zip(places, runs):
        axes.annotate(f"{run.last_loss:.3f}", (place, run.last_loss), (6, 4), textcoords="offset points",
                      fontsize=SMALL, color=INK)  # fmt: skip
    axes.set_zorder(shares.get_zorder() + 1)  # points in front of bars
    axes.patch.set_visible(False)
    axes.margins(x=0.12, y=0.25)
    axes.set_xticks(places, [run.name for run in runs], fontsize=SMALL)
    axes.set_xlabel("capacity factor", fontsize=NORMAL)
    axes.set_title(
        f"mean of the last {LAST} steps: loss (points), dropped (bars)", loc="left", fontsize=NORMAL
    )
    quiet(axes)
    quiet(shares)


def main(
    factors: tuple[float | None, ...] = FACTORS,
    steps: int = 300,
    seed: int = 0,
    out: Path = Path("runs/capacity.png"),
) -> None:
    """Train a small mixture of 8 experts once for each capacity factor, and draw loss and drops.

    Args:
        factors: capacity factors; None: no limit.
        steps: optimizer steps of each run.
        seed: seed of weights and batches.
        out: a .png, .svg or .pdf.
    """
    require_positive(steps=steps)
    require_picture("out", out)
    for factor in factors:
        replace(MODEL, capacity_factor=factor)  # raises ValueError for a factor out of range
    torch.set_num_threads(1)  # the matrices are too small for several threads
    runs = []
    for factor in factors:
        runs.append(train_with(factor, steps, seed))
        print(f"capacity factor {runs[-1].name:>12}: loss {runs[-1].last_loss:.3f}, "
              f"dropped {runs[-1].last_dropped:.1%}", flush=True)  # fmt: skip
    print(f"wrote {draw_capacity(runs, out)}")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main, prog="python -m minipar.visualize.capacity")
    except ValueError as error:
        raise SystemExit(f"minipar.visualize.capacity: {error}") from None
