"""A picture of what each rank did and when: computing above, communication below, waiting hatched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipar.support.trace import DATA, Span, busy_s, overlap_fraction
from minipar.visualize.style import (
    BLUE,
    GREEN,
    GREY,
    IDLE,
    INK,
    LARGE,
    NORMAL,
    PURPLE,
    SMALL,
    VERMILION,
    Style,
    new_figure,
    quiet,
    text_on,
    write,
)

FORWARD, BACKWARD = "#aedcf4", VERMILION  # as in the pictures of pipelines
COMPUTE = {"forward": FORWARD, "backward": BACKWARD, "optimizer": PURPLE}
# The first word of a pipeline action's span ("B of microbatch 0 ...") -> kind of compute.
PIPELINE = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
WIDTH_INCHES, LANE_INCHES, GAP_INCHES = 13.0, 0.3, 0.14


class Arrow(NamedTuple):
    """A message: sent by rank `source` at one time, received by rank `to` at another."""

    source: int
    sent_s: float
    to: int
    received_s: float


def draw_trace(
    spans_by_rank: Mapping[int, Sequence[Span]],
    path: str | Path,
    title: str | None = None,
    arrows: Sequence[Arrow] = (),
) -> Path:
    """Write `trace_figure` to a .png, .svg or .pdf; return the path."""
    return write(trace_figure(spans_by_rank, title, arrows), path)


def trace_figure(
    spans_by_rank: Mapping[int, Sequence[Span]], title: str | None = None, arrows: Sequence[Arrow] = ()
) -> Figure:
    """Draw the spans of each rank on one time axis, in milliseconds from the first span.

    Each rank is a band: on top the lane of its own thread (compute by name, synchronous communication, waiting), below it
    one lane per Comm that ran asynchronously. If any rank has such a lane, the fraction of each rank's communication that
    was hidden behind compute is written at the right. Arrows are drawn over the bands, from sender to receiver.

    Raises ValueError where there is nothing to draw.
    """
    everything = [s for spans in spans_by_rank.values() for s in spans]
    if not everything:
        raise ValueError("no spans to draw; set `world.trace` before the steps to record")
    origin_s = min(s.start_s for s in everything)
    length_ms = max((max(s.end_s for s in everything) - origin_s) * 1e3, 1e-3)
    lanes = {rank: _lanes(spans) for rank, spans in spans_by_rank.items()}
    height = sum(len(names) * LANE_INCHES + GAP_INCHES for names in lanes.values())
    figure = new_figure(WIDTH_INCHES, height + 1.2)
    axes = figure.subplots()
    asynchronous = any(s.kind == "communicate" and s.lane != "main" for s in everything)
    top, middle = 0.0, {}
    for rank, spans in spans_by_rank.items():
        middle[rank] = top + 0.5
        for lane in lanes[rank]:
            _draw_lane(axes, [s for s in spans if s.lane == lane], top, origin_s, length_ms)
            label = f"rank {rank}" if lane == "main" else _short(lane)
            size, colour = (NORMAL, INK) if lane == "main" else (SMALL, GREY)
            axes.text(
                -0.006 * length_ms, top + 0.5, label, ha="right", va="center", fontsize=size, color=colour
            )
            top += 1
        if asynchronous:
            _write_overlap(axes, spans, middle[rank], length_ms)
        top += GAP_INCHES / LANE_INCHES
    for arrow in arrows:
        _draw_arrow(axes, arrow, middle, origin_s)
    axes.set(xlim=(0, length_ms), ylim=(top, -0.15), yticks=[], xlabel="milliseconds")
    quiet(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.set_title(title or _headline(spans_by_rank, length_ms), loc="left", fontsize=LARGE, pad=10)
    figure.legend(
        handles=_legend(everything), loc="outside lower center", ncols=8, fontsize=NORMAL, frameon=False
    )
    return figure


def _lanes(spans: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(["main", *(s.lane for s in spans)]))


def _draw_lane(axes: Axes, spans: Sequence[Span], top: float, origin_s: float, length_ms: float) -> None:
    """Draw longer spans first, so that the spans they enclose are drawn over them."""
    for s in sorted(spans, key=lambda s: s.start_s - s.end_s):
        start, end = (s.start_s - origin_s) * 1e3, (s.end_s - origin_s) * 1e3
        if s.kind == "wait":
            axes.broken_barh([(start, end - start)], (top + 0.06, 0.88), **IDLE)
            if s.name == DATA:
                _write_name(axes, s, start, end, top, length_ms)
            continue
        axes.broken_barh(
            [(start, end - start)], (top + 0.06, 0.88), facecolor=_colour(s), edgecolor="white", linewidth=0.4
        )
        covered_s = min((o.start_s for o in spans if s.start_s < o.start_s < s.end_s), default=s.end_s)
        _write_name(axes, s, start, (covered_s - origin_s) * 1e3, top, length_ms)


def _write_name(axes: Axes, s: Span, start: float, end: float, top: float, length_ms: float) -> None:
    """Write the span's name between `start` and `end`, the part that no other span covers, if it fits."""
    name, points = s.name.split()[0], (end - start) / length_ms * WIDTH_INCHES * 0.85 * 72
    if points > 0.62 * SMALL * len(name) + 4:
        colour = INK if s.kind == "wait" else text_on(_colour(s))
        style: Style = dict(ha="center", va="center", fontsize=SMALL, color=colour)
        axes.text((start + end) / 2, top + 0.52, name, **style)


def _colour(s: Span) -> str:
    return {"communicate": BLUE, "disk": GREEN}.get(s.kind) or COMPUTE.get(_what(s), GREY)


def _what(s: Span) -> str:
    """Return the kind of compute of a pipeline action's span; for any other span, its name."""
    first = s.name.split()[0]
    return PIPELINE.get(first, s.name)


def _short(lane: str) -> str:
    """Return the last part of a Comm's name: `comm 'world/dp'` -> `dp`."""
    return lane.strip("'").rpartition("/")[2].removeprefix("comm '")


def _draw_arrow(axes: Axes, arrow: Arrow, middle: Mapping[int, float], origin_s: float) -> None:
    start, end = (
        ((seconds - origin_s) * 1e3, middle[rank])
        for rank, seconds in ((arrow.source, arrow.sent_s), (arrow.to, arrow.received_s))
    )
    style: Style = dict(arrowstyle="-|>", color=INK, linewidth=0.8, shrinkA=0, shrinkB=0)
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def _write_overlap(axes: Axes, spans: Sequence[Span], middle: float, length_ms: float) -> None:
    if busy_s(spans, "communicate"):
        text = f"{overlap_fraction(spans):.0%} of its\ncommunication\nis hidden"
        axes.text(1.006 * length_ms, middle + 0.3, text, va="center", fontsize=SMALL)


def _headline(spans_by_rank: Mapping[int, Sequence[Span]], length_ms: float) -> str:
    ranks = len(spans_by_rank)
    communicating = sum(busy_s(spans, "communicate") for spans in spans_by_rank.values()) / ranks
    text = f"{ranks} ranks, {length_ms:.1f} ms"
    return f"{text}; {communicating * 1e3:.1f} ms of communication a rank" if communicating else text


def _legend(spans: Sequence[Span]) -> list[Patch]:
    names = {_what(s) for s in spans if s.kind == "compute"}
    handles = [Patch(facecolor=colour, label=name) for name, colour in COMPUTE.items() if name in names]
    if names - set(COMPUTE):
        handles.append(
            Patch(facecolor=GREY, label="other computing" if names & set(COMPUTE) else "computing")
        )
    kinds = {s.kind for s in spans}
    if "communicate" in kinds:
        handles.append(Patch(facecolor=BLUE, label="communication"))
    if "disk" in kinds:
        handles.append(Patch(facecolor=GREEN, label="disk"))
    if "wait" in kinds:
        handles.append(Patch(**IDLE, label="waiting"))
    return handles
