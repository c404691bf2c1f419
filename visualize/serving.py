"""Pictures of a service: each request as a row over time, the blocks in use, and static batches beside continuous ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minipar.inference.events import Event, Kind, StepCounts
from minipar.inference.static import in_steps, places_of, static_batches
from minipar.visualize.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    IDLE,
    INK,
    LARGE,
    ORANGE,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    write,
)

SPANS: dict[Kind, Style] = {
    Kind.PREFILL: {"color": ORANGE},
    Kind.DECODE: {"color": BLUE},
    Kind.PAD: IDLE,
}
WAITS: Style = {"color": FAINT, "label": "waiting"}
MOST_NAMED = 40  # up to this many rows, each is named; of more rows, only every n-th


def draw_service(
    events: Sequence[Event],
    steps: Sequence[StepCounts],
    path: str | Path,
    num_blocks: int | None = None,
    unit: str = "seconds",
) -> Path:
    """Write `service_figure` to a .png, .svg or .pdf; return the path."""
    return write(service_figure(events, steps, num_blocks, unit), path)


def draw_batching(
    events: Sequence[Event], steps: Sequence[StepCounts], path: str | Path, batch_size: int
) -> Path:
    """Write `batching_figure` to a .png, .svg or .pdf; return the path."""
    return write(batching_figure(events, steps, batch_size), path)


def service_figure(
    events: Sequence[Event],
    steps: Sequence[StepCounts],
    num_blocks: int | None = None,
    unit: str = "seconds",
) -> Figure:
    """Draw a row for each request that was served, in order of arrival, and the blocks held at each step.

    unit   the unit of the log's times: "steps" if each step was counted as one second

    Grey means that the request waits, orange that a piece of its prompt is read (or of its text, after a preemption), blue
    that it decodes; a cross, that it lost its blocks.
    """
    if not steps:
        raise ValueError("no steps to draw; serve at least one request")
    arrivals, rows = _rows(events)
    height = max(1.2, 0.17 * min(len(rows), 60))
    figure = new_figure(9.0, 2.4 + height)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.1))
    _draw_rows(above, events, rows, arrivals)
    above.set_title("requests, by arrival", loc="left", fontsize=LARGE)
    _legend(above)
    _draw_blocks(below, steps, num_blocks)
    below.set_xlabel(unit, fontsize=SMALL)
    below.set_xlim(left=0)
    return figure


def batching_figure(events: Sequence[Event], steps: Sequence[StepCounts], batch_size: int) -> Figure:
    """Draw the requests of a log twice on one axis of steps: in static batches of this size, and as they were served.

    Hatched rows of a static batch compute padding until its longest request is done.
    """
    if not any(event.kind == Kind.FINISH for event in events):
        raise ValueError("no finished request to draw; serve at least one")
    served = in_steps(events, steps)
    logs = {f"static batches of {batch_size}": static_batches(served, batch_size), "continuous": served}
    arrivals, rows = _rows(logs["continuous"])
    figure = new_figure(9.0, 1.2 + 2 * max(1.0, 0.12 * min(len(rows), 45)))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (name, log) in zip(panels, logs.items()):
        used = places_of(log, batch_size)
        _draw_rows(axes, log, rows, arrivals)
        axes.axvline(max(event.end_s for event in log), color=INK, linewidth=0.8)
        axes.set_title(
            f"{name}: {used.num_steps} steps, {used.share:.0%} of {batch_size} places at work",
            loc="left",
            fontsize=LARGE,
        )
        axes.set_ylabel("request", fontsize=SMALL)
    _legend(panels[0])
    panels[1].set_xlabel("steps", fontsize=SMALL)
    panels[1].set_xlim(left=0)
    return figure


def _rows(events: Sequence[Event]) -> tuple[dict[int, float], dict[int, int]]:
    """Return each request's arrival, and its row, in order of arrival."""
    arrivals = {event.number: event.begin_s for event in events if event.kind == Kind.ARRIVE}
    ordered = sorted(arrivals, key=lambda number: (arrivals[number], number))
    return arrivals, {number: row for row, number in enumerate(ordered)}


def _draw_rows(axes: Axes, events: Sequence[Event], rows: dict[int, int], arrivals: dict[int, float]) -> None:
    ends = [event for event in events if event.kind == Kind.FINISH]
    axes.barh(
        [rows[event.number] for event in ends],
        [event.end_s - arrivals[event.number] for event in ends],
        0.4,
        [arrivals[event.number] for event in ends],
        **WAITS,
    )
    for kind, style in SPANS.items():
        spans = [event for event in events if event.kind == kind]
        if spans:
            axes.barh(
                [rows[event.number] for event in spans],
                [event.end_s - event.begin_s for event in spans],
                0.8,
                [event.begin_s for event in spans],
                label=kind.value,
                **style,
            )
    lost = [event for event in events if event.kind == Kind.PREEMPT]
    if lost:
        places = [event.begin_s for event in lost], [rows[event.number] for event in lost]
        axes.plot(*places, "x", color=INK, markersize=5, markeredgewidth=1.4, label="preempted")
    every = -(-len(rows) // MOST_NAMED)
    named = {row: number for number, row in rows.items() if row % every == 0}
    axes.set_yticks(list(named), [str(number) for number in named.values()])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    quiet(axes)
    axes.tick_params(axis="y", length=0)


def _draw_blocks(axes: Axes, steps: Sequence[StepCounts], num_blocks: int | None) -> None:
    edges = [*(step.begin_s for step in steps), steps[-1].end_s]
    held = [step.blocks_of_requests for step in steps]
    kept = [step.blocks_of_requests + step.blocks_of_prefixes for step in steps]
    if kept != held:
        axes.stairs(kept, edges, fill=True, color=GREY, label="prefix cache")
    axes.stairs(held, edges, fill=True, color=GREEN, label="requests")
    title = "blocks of the cache" if num_blocks is None else f"blocks of the cache, of {num_blocks}"
    # In a cache that is far from full, the blocks held would be too low to see below this line.
    if num_blocks is not None and num_blocks <= 2 * max(kept):
        axes.axhline(num_blocks, color=VERMILION, linewidth=0.8, label="all blocks")
    axes.set_title(title, loc="left", fontsize=LARGE)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_ylim(bottom=0)
    _legend(axes)
    quiet(axes, grid="y")


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=SMALL, frameon=False, ncols=5, loc="lower right", bbox_to_anchor=(1.0, 1.0))
