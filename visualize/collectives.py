"""Pictures of collectives: the partial sums that a ring sends, step by step, and how long each algorithm takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator

from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LARGE,
    NORMAL,
    ORANGE,
    PURPLE,
    RANKS,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    write,
)

# [rank][chunk]: the ranks whose contributions are summed in this rank's copy of the chunk.
State = tuple[tuple[frozenset[int], ...], ...]


class Step(NamedTuple):
    """One step of a ring all-reduce: rank r sends chunk sends[r] to its right neighbour; `after` is the resulting state."""

    phase: str  # "reduce-scatter" or "all-gather"
    sends: tuple[int, ...]
    after: State


def ring_start(p: int) -> State:
    return tuple(tuple(frozenset([rank]) for _ in range(p)) for rank in range(p))


def ring_steps(p: int) -> Iterator[Step]:
    """Yield the 2(p-1) steps of a ring all-reduce over p ranks, as `minipar.comm.ring` takes them.

    In step s = 1, 2, ... rank r sends chunk r - s (mod p). The receiver adds the chunk to its own copy in the first p-1
    steps, and replaces its copy with it afterwards.
    """
    held = ring_start(p)
    for step in range(1, 2 * p - 1):
        sends = tuple((rank - step) % p for rank in range(p))
        after = [list(chunks) for chunks in held]
        for rank in range(p):
            left = (rank - 1) % p
            after[rank][sends[left]] |= held[left][sends[left]]
        held = tuple(map(tuple, after))
        yield Step("reduce-scatter" if step < p else "all-gather", sends, held)


# Step by step -----------------------------------------------------------------------------------------------------


def draw_ring(p: int, path: str | Path) -> Path:
    """Write small multiples of a ring all-reduce over p ranks, one panel per step; return the path.

    A row is a rank, and a box is one chunk of its vector, with the chunk's number above its column. The box has the colours
    of the ranks whose contributions the chunk sums; a box with all colours is a complete sum. A heavy frame marks the chunk
    just received.
    """
    check_ring(p)
    steps = list(ring_steps(p))
    figure = new_figure(2.3 * p + 0.6, 2 * (0.36 * p + 0.75) + 0.4)
    grid = figure.subplots(2, p)
    _draw_state(grid[0][0], ring_start(p), None)
    grid[0][0].set_title("start", loc="left", fontsize=NORMAL)
    for number, step in enumerate(steps):
        axes = grid[number // (p - 1)][number % (p - 1) + 1]
        _draw_state(axes, step.after, step.sends)
        axes.set_title(f"{number + 1}  {step.phase}", loc="left", fontsize=NORMAL)
    _draw_key(grid[1][0], p)
    figure.suptitle(f"ring all-reduce over {p} ranks: {2 * (p - 1)} steps of one chunk each", fontsize=LARGE)
    return write(figure, path)


def _draw_state(axes: Axes, state: State, sends: Sequence[int] | None) -> None:
    p = len(state)
    for rank, chunks in enumerate(state):
        arrived = None if sends is None else sends[(rank - 1) % p]
        for chunk, summed in enumerate(chunks):
            draw_chunk(axes, chunk, rank, 0.9, 0.72, summed, p, heavy=chunk == arrived)
    axes.set(xlim=(-0.02, p), ylim=(p - 0.1, -0.1))
    axes.set_yticks([rank + 0.36 for rank in range(p)], [f"rank {rank}" for rank in range(p)], fontsize=SMALL)
    axes.set_xticks([chunk + 0.45 for chunk in range(p)], [f"c{chunk}" for chunk in range(p)], fontsize=SMALL)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=1)
    axes.spines[:].set_visible(False)


def draw_chunk(
    axes: Axes, x: float, y: float, width: float, height: float, summed: Set[int], p: int, heavy: bool = False
) -> None:
    """Draw a chunk as a box with a stripe in the colour of each rank in its sum."""
    stripe = width / p
    for rank in range(p):
        colour = RANKS[rank % len(RANKS)] if rank in summed else "white"
        axes.add_patch(Rectangle((x + rank * stripe, y), stripe, height, facecolor=colour, linewidth=0))
    edge: Style = dict(edgecolor=INK, linewidth=1.8) if heavy else dict(edgecolor=GREY, linewidth=0.6)
    axes.add_patch(Rectangle((x, y), width, height, facecolor="none", zorder=3 if heavy else 2, **edge))


def _draw_key(axes: Axes, p: int) -> None:
    axes.axis("off")
    axes.set(xlim=(-0.02, p), ylim=(p - 0.1, -0.1))
    for rank in range(p):
        draw_chunk(axes, 0, rank, 0.9, 0.72, {rank}, p)
        axes.text(1.05, rank + 0.36, f"rank {rank}'s contribution", va="center", fontsize=SMALL)
    axes.set_title("c0, c1, ...: the chunks", loc="left", fontsize=SMALL)


def check_ring(p: int) -> None:
    if not 2 <= p <= len(RANKS):
        raise ValueError(f"p={p} ranks make no picture; use 2 to {len(RANKS)}")


# How long they take -----------------------------------------------------------------------------------------------

CURVES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, GREY)


def draw_alpha_beta(
    points: Mapping[str, Sequence[tuple[int, float]]],
    formulas: Mapping[str, Callable[[int], float]],
    path: str | Path,
    dots: str = "measured",
) -> Path:
    """Plot the time of all-reduce algorithms against the vector's bytes, beside their alpha-beta formulas; return the path.

    points    algorithm -> (bytes of the vector, seconds): dots
    formulas  algorithm -> function from bytes to seconds: lines
    dots      what the dots are, for the legend
    """
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    sizes = sorted({num_bytes for found in points.values() for num_bytes, _ in found})
    between = [round(sizes[0] * (sizes[-1] / sizes[0]) ** (i / 100)) for i in range(101)]
    for (name, found), colour in zip(points.items(), CURVES):
        if name in formulas:
            axes.plot(between, [1e3 * formulas[name](n) for n in between], color=colour, linewidth=1.4)
        axes.plot(*zip(*((n, 1e3 * s) for n, s in found)), "o", color=colour, ms=4.5, label=name)
    axes.set_title("time of one all-reduce", loc="left", fontsize=NORMAL)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [_readable(n) for n in sizes])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    quiet(axes, grid="both")
    axes.tick_params(which="minor", labelsize=SMALL, color=GREY, length=2)
    axes.grid(which="minor", axis="y", color=FAINT, linewidth=0.3)
    axes.set_xlabel("bytes of the vector", fontsize=NORMAL)
    axes.set_ylabel("milliseconds", fontsize=NORMAL)
    title = f"dots: {dots}\nlines: alpha-beta formula"
    axes.legend(fontsize=NORMAL, frameon=False, title=title, title_fontsize=SMALL, alignment="left")
    return write(figure, path)


def _readable(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"
