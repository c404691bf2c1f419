"""Pictures of pipelines: what each rank computes when, its bubble, and how many activations it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from minipar.schedules import Action, Costs, Timeline, simulate
from minipar.visualize.pipeline_text import chunk_of, headline
from minipar.visualize.style import Style

# Fill, text colour, height, name. Okabe and Ito's hues, distinct in every kind of colour vision. Lightness differs too,
# and W's boxes are lower, so that the operations also differ in greyscale; only bubble is hatched.
STYLE = {
    "F": ("#aedcf4", "black", 0.92, "F  forward"),
    "B": ("#d55e00", "white", 0.92, "B  backward"),
    "I": ("#e69f00", "black", 0.92, "I  input gradient"),
    "W": ("#00614a", "white", 0.66, "W  weight gradient"),
}
BUBBLE: Style = {"facecolor": "#dcdcdc", "hatch": "////", "edgecolor": "#f4f4f4", "linewidth": 0}
ROW_INCHES, LIVE_INCHES, WIDTH_INCHES = 0.34, 0.2, 13.0


def draw_timeline(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path,
    titles: Sequence[str] | None = None,
    dpi: int = 150,
    unit: str = "",
) -> list[Path]:
    """Write `timeline_figure` to `path`; return the files written.

    path    the suffix decides the format: .png, .svg or .pdf; without such a suffix, a PNG and an SVG are written
    """
    figure, path = timeline_figure(timelines, titles, unit), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.suffix in (".png", ".svg", ".pdf")
    files = [path] if whole else [Path(f"{path}.png"), Path(f"{path}.svg")]
    for file in files:
        # Without a date and random ids, the same timeline gives the same file.
        with matplotlib.rc_context({"svg.hashsalt": "minipar"}):
            figure.savefig(file, dpi=dpi, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def draw_beside_predicted(
    measured: Timeline, path: str | Path, costs: Costs | None = None, dpi: int = 150
) -> list[Path]:
    """Draw a run's timeline below a simulated one, on one time axis in seconds.

    costs   the simulation's, in seconds; default: the run's mean costs
    """
    predicted = simulate(measured.schedule, costs or measured.costs)
    titles = [f"predicted   {headline(predicted, ' s')}", f"measured   {headline(measured, ' s')}"]
    return draw_timeline([predicted, measured], path, titles, dpi, "seconds")


def timeline_figure(
    timelines: Timeline | Sequence[Timeline], titles: Sequence[str] | None = None, unit: str = ""
) -> Figure:
    """Draw timelines below one another on one time axis, each with its ranks' live activations below it.

    Simulated and measured timelines are drawn alike, from `Timeline.spans`. The bubble is hatched: each rank's idle time
    within a window (see `bubble_gaps`), so that the hatched fraction of all windows is exactly `bubble_over_total`. Time
    outside the window, in white, can be used by the steps before and after.

    titles  a title for each timeline, instead of the schedule's name and figures
    unit    the unit of time, written at the time axis: "seconds", "forwards"
    """
    timelines = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not timelines:
        raise ValueError("no timelines to draw; give at least one")
    titles = [headline(timeline) for timeline in timelines] if titles is None else titles
    rows = [timeline.schedule.num_ranks for timeline in timelines]
    heights = [inches * n for n in rows for inches in (ROW_INCHES, LIVE_INCHES)]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.75 * len(timelines) + 0.7), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    duration = max(timeline.makespan for timeline in timelines)
    for timeline, title, gantt, live in zip(timelines, titles, axes[::2], axes[1::2]):
        _draw_actions(gantt, timeline, duration)
        gantt.set_title(title, loc="left", fontsize=10, pad=8)
        _draw_live(live, timeline, duration)
    axes[-1].set_xlabel(f"time, in {unit}" if unit else "time", fontsize=9)
    axes[-1].tick_params(length=3, labelbottom=True, labelsize=9)
    axes[-1].tick_params(axis="y", length=0)
    _draw_legend(figure, timelines)
    return figure


def bubble_gaps(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return, for each rank, the (start, end) of its idle gaps inside its window: `bubble_over_total` of all windows.

    All windows are as long as the longest time from first to last action of any rank. A rank's window starts with the
    rank's first action, or earlier where it would otherwise end after the makespan.
    """
    length = timeline.longest_own_span
    latest = _origin(timeline) + timeline.makespan - length
    gaps = []
    for actions in timeline.schedule.actions:
        spans = [timeline.spans[action] for action in actions]
        start = min([latest, *(first for first, _ in spans[:1])])
        ends = [start, *(end for _, end in spans)]
        starts = [*(start for start, _ in spans), start + length]
        gaps.append([(a, b) for a, b in zip(ends, starts) if b > a])
    return gaps


def _draw_actions(axes: Axes, timeline: Timeline, duration: float) -> None:
    origin = _origin(timeline)
    for rank, gaps in enumerate(bubble_gaps(timeline)):
        boxes = [(start - origin, end - start) for start, end in gaps]
        axes.broken_barh(boxes, (rank - 0.46, 0.92), **BUBBLE)
    for rank, actions in enumerate(timeline.schedule.actions):
        ordered = sorted(actions, key=lambda action: _kind(timeline, action))
        for (op, chunk), same in groupby(ordered, key=lambda action: _kind(timeline, action)):
            fill, _, height, _ = STYLE[op]
            axes.broken_barh(
                [(start - origin, end - start) for start, end in (timeline.spans[action] for action in same)],
                (rank - height / 2, height),
                facecolor=_lighter(fill, chunk),
                edgecolor="white",
                linewidth=0.6 if len(actions) < 500 else 0,
            )
        for action in actions:
            _write_number(axes, timeline, action, rank, duration)
    _style_rows(axes, timeline, duration)


def _kind(timeline: Timeline, action: Action) -> tuple[str, int]:
    return action.op, chunk_of(timeline, action)


def _write_number(axes: Axes, timeline: Timeline, action: Action, rank: int, duration: float) -> None:
    """Write the unit's number as large as its box allows, or not at all where it would be too small to read."""
    start, end = timeline.spans[action]
    number = timeline.schedule.label(action.microbatch)
    room_points = (end - start) / duration * WIDTH_INCHES * 72 * 0.9
    size = min(9.0, room_points / (0.7 * len(number)))
    if size >= 4:
        middle = (start + end) / 2 - _origin(timeline)
        colour = STYLE[action.op][1] if chunk_of(timeline, action) == 0 else "black"
        axes.text(middle, rank, number, ha="center", va="center_baseline", fontsize=size, color=colour)


def _draw_live(axes: Axes, timeline: Timeline, duration: float) -> None:
    """Draw each rank's live activations as a step curve, all on one scale, with the peak beside each curve."""
    origin, most = _origin(timeline), max(timeline.peak_live, default=1) or 1
    for rank, peak in enumerate(timeline.peak_live):
        changes = [(0.0, 0), *((time - origin, count) for time, count in timeline.live(rank)), (duration, 0)]
        times, counts = zip(*changes)
        floor = rank + 0.42
        tops = [floor - 0.84 * count / most for count in counts]
        axes.fill_between(times, tops, floor, step="post", color="#7f7f9f", linewidth=0)
        axes.text(duration, rank, f" {peak}", va="center", fontsize=9)
    axes.set_title("live activations", loc="left", fontsize=9, pad=2)
    axes.set_title("peak", loc="right", fontsize=9, pad=2)
    _style_rows(axes, timeline, duration)


def _style_rows(axes: Axes, timeline: Timeline, duration: float) -> None:
    ranks = range(timeline.schedule.num_ranks)
    axes.set_xlim(0, duration)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=9)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    ops = [op for op in STYLE if any(action.op == op for timeline in timelines for action in timeline.spans)]
    entries: list[tuple[Any, str]] = [(Patch(facecolor=STYLE[op][0]), STYLE[op][3]) for op in ops]
    drawn = [
        timeline.schedule
        for timeline in timelines
        if timeline.schedule.num_stages > timeline.schedule.num_ranks
    ]
    if drawn:
        lighter = tuple(Patch(facecolor=_lighter(STYLE[op][0], 1)) for op in ops)
        entries.append((lighter, "lighter: a rank's later stages"))
    entries.append((Patch(**BUBBLE), "bubble"))
    handles, labels = zip(*entries)
    place: Style = dict(loc="outside lower center", ncols=len(entries), fontsize=9, frameon=False)
    figure.legend(handles, labels, handler_map={tuple: HandlerTuple(None)}, **place)


def _lighter(colour: str, chunk: int) -> tuple[float, float, float]:
    """Return the first chunk's colour, mixed with white for later chunks."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    keep = 0.6**chunk
    red, green, blue = (1 - keep * (1 - channel) for channel in channels)
    return red, green, blue


def _origin(timeline: Timeline) -> float:
    return min((start for start, _ in timeline.spans.values()), default=0.0)
