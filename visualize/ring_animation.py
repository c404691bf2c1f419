"""A ring all-reduce as an animation: ranks on a circle, each sending chunks to its right neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi, sin
from pathlib import Path

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minipar.visualize.collectives import State, Step, check_ring, draw_chunk, ring_start, ring_steps
from minipar.visualize.style import FAINT, LARGE, SMALL

REST, END = 2, 8  # frames without motion, after each step and at the end
WIDTH, HEIGHT, PITCH = 0.36, 0.15, 0.19  # size of a chunk's box, and PITCH from one chunk to the next


def animate_ring(p: int, path: str | Path, frames_per_step: int = 5) -> Path:
    """Write an animated GIF of a ring all-reduce over p ranks; return the path.

    Colours as in `minipar.visualize.collectives.draw_ring`.
    """
    check_ring(p)
    steps = list(ring_steps(p))
    before = [ring_start(p), *(step.after for step in steps)]
    figure = Figure(figsize=(5.0, 5.2))
    axes = figure.add_axes((0, 0, 1, 0.94))

    def draw(frame: int) -> None:
        number, moment = divmod(frame, frames_per_step + REST)
        step = steps[number] if number < len(steps) else None
        _draw_circle(axes, before[number if step else -1], step, moment / frames_per_step)
        text = f"{step.phase}, step {number % (p - 1) + 1} of {p - 1}" if step else "every rank has the sum"
        figure.suptitle(text, fontsize=LARGE)

    count = len(steps) * (frames_per_step + REST) + END
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    FuncAnimation(figure, draw, frames=count, init_func=lambda: None).save(path, PillowWriter(fps=7), dpi=72)
    return path


def _draw_circle(axes: Axes, state: State, step: Step | None, progress: float) -> None:
    """Draw the ranks and their chunks; a chunk being sent is `progress` (0 to 1) of the way to the right neighbour."""
    axes.clear()
    axes.axis("off")
    axes.set(xlim=(-1.6, 1.6), ylim=(1.6, -1.6), aspect="equal")
    p = len(state)
    arrived = progress >= 1
    chunks = step.after if step and arrived else state
    for rank in range(p):
        (x, y), (to_x, to_y) = _place(rank, p), _place(rank + 1, p)
        arrow = dict(arrowstyle="->", color=FAINT, linewidth=2, shrinkA=46, shrinkB=46)
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=arrow, zorder=0)
        _draw_rank(axes, x, y, rank, chunks[rank])
    for rank, chunk in enumerate(step.sends if step and not arrived else ()):
        (x, y), (to_x, to_y) = _place(rank, p), _place(rank + 1, p)
        x, y = x + (to_x - x) * progress, y + (to_y - y) * progress
        draw_chunk(axes, *_slot(x, y, chunk, p), WIDTH, HEIGHT, state[rank][chunk], p, heavy=True)


def _draw_rank(axes: Axes, x: float, y: float, rank: int, chunks: Sequence[frozenset[int]]) -> None:
    p = len(chunks)
    left, top = _slot(x, y, 0, p)
    frame = (left - 0.05, top - 0.17), WIDTH + 0.1, p * PITCH + 0.18
    axes.add_patch(Rectangle(*frame, facecolor="white", edgecolor=FAINT, zorder=0.5))
    axes.text(x, top - 0.08, f"rank {rank}", ha="center", va="center", fontsize=SMALL)
    for chunk, summed in enumerate(chunks):
        draw_chunk(axes, *_slot(x, y, chunk, p), WIDTH, HEIGHT, summed, p)


def _place(rank: int, p: int) -> tuple[float, float]:
    return 1.15 * sin(2 * pi * rank / p), -1.05 * cos(2 * pi * rank / p)


def _slot(x: float, y: float, chunk: int, p: int) -> tuple[float, float]:
    """Return the upper left corner of a chunk, for a rank centred at x, y."""
    return x - WIDTH / 2, y + (chunk - p / 2) * PITCH
