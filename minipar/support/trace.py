"""Spans of compute, communicate, disk and wait time on a rank, and their export as a file that Perfetto opens.

    trace = Trace()
    world.trace = trace                      # every Comm made from `world` records into it
    with trace.span("compute", "forward"):
        ...
    write_chrome_trace("trace.json", {rank: trace.spans})

Times are seconds of the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["compute", "communicate", "disk", "wait"]
Interval = tuple[float, float]  # start, end
DATA = "data"  # the name of a wait for the next batch


class Span(NamedTuple):
    kind: Kind
    name: str
    start_s: float
    end_s: float
    lane: str = "main"  # the rank's main thread, the stream of one Comm, or the thread of offloaded states


class Trace:
    """The spans of one rank, in the order in which they ended. Recording a span costs about a microsecond.

    now  returns the host's time, for `add`; `comm/transport/cuda_trace.py` has a trace in GPU time
    """

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, kind: Kind, name: str, start_s: float, end_s: float, lane: str = "main") -> None:
        self.spans.append(Span(kind, name, start_s, end_s, lane))  # list.append is safe from any thread

    @contextmanager
    def span(self, kind: Kind, name: str, lane: str = "main") -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.add(kind, name, start, self.now(), lane)


def span(trace: Trace | None, kind: Kind, name: str, lane: str = "main") -> AbstractContextManager[None]:
    """Return `trace.span(kind, name, lane)`, or a context that does nothing if `trace` is None."""
    return nullcontext() if trace is None else trace.span(kind, name, lane)


def busy_s(spans: Iterable[Span], kind: Kind) -> float:
    """Return the time, in seconds, covered by at least one span of this kind."""
    return _length(_union(spans, kind))


def overlap_fraction(spans: Sequence[Span], kind: Kind = "communicate") -> float:
    """Return the fraction of this kind's time during which the rank also computed: 0 is no overlap, 1 complete overlap.

    A lane does one thing at a time: communicate and wait spans inside a compute span of the same lane are subtracted.
    """
    of_kind = _union(spans, kind)
    computing = _merge(chain.from_iterable(_computing(spans)))
    hidden_s, total_s = _length(_intersection(of_kind, computing)), _length(of_kind)
    return min(1.0, hidden_s / total_s) if total_s else 0.0


def _computing(spans: Sequence[Span]) -> Iterator[list[Interval]]:
    """Yield, for each lane, the intervals of its compute spans without its communicate and wait spans."""
    for lane in {s.lane for s in spans}:
        own = [s for s in spans if s.lane == lane]
        yield _intersection(_union(own, "compute"), _complement(_union(own, "communicate", "wait")))


class Straggler(NamedTuple):
    """The rank that computed longest, and how many times as long as the median rank."""

    rank: int
    ratio: float


def find_straggler(spans_by_rank: dict[int, list[Span]]) -> Straggler | None:
    """Return the rank that computed longest, or None if fewer than two ranks recorded anything.

    Only compute time is compared: a rank's communicate and wait spans also contain time spent waiting for other ranks.
    """
    computed = {
        rank: sum(_length(c) for c in _computing(spans)) for rank, spans in spans_by_rank.items() if spans
    }
    if len(computed) < 2:
        return None
    slowest = max(computed, key=lambda rank: computed[rank])
    return Straggler(slowest, computed[slowest] / max(statistics.median_low(computed.values()), 1e-9))


class DataWait(NamedTuple):
    """The rank that waited longest for its batches, and the fraction of the traced time for which it waited."""

    rank: int
    fraction: float


def find_data_wait(spans_by_rank: dict[int, list[Span]]) -> DataWait | None:
    """Return the rank that waited longest for data, or None if no rank recorded such a wait.

    The traced time runs from the start of the first span to the end of the last one, over all ranks. One rank is enough,
    because the other ranks wait for it in their next collective.
    """
    waited_s = {
        rank: _length(_union([s for s in spans if s.name == DATA], "wait"))
        for rank, spans in spans_by_rank.items()
    }
    longest = max(waited_s, key=lambda rank: waited_s[rank], default=0)
    if not waited_s.get(longest):
        return None
    everything = [s for spans in spans_by_rank.values() for s in spans]
    traced_s = max(s.end_s for s in everything) - min(s.start_s for s in everything)
    return DataWait(longest, waited_s[longest] / traced_s)


# Sorted lists of disjoint intervals ----------------------------------------------------------------------------


def _union(spans: Iterable[Span], *kinds: Kind) -> list[Interval]:
    return _merge((s.start_s, s.end_s) for s in spans if s.kind in kinds)


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _complement(intervals: list[Interval]) -> list[Interval]:
    """Return the complement of these intervals, from -inf to inf."""
    edges = [-math.inf, *(t for interval in intervals for t in interval), math.inf]
    return list(zip(edges[::2], edges[1::2]))


def _intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the intersection of a and b."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def chrome_events(spans_by_rank: dict[int, list[Span]]) -> list[dict[str, Any]]:
    """Convert spans to Chrome trace events: one process per rank, one thread per lane, microseconds from the first span."""
    starts = [s.start_s for spans in spans_by_rank.values() for s in spans]
    origin_s = min(starts, default=0.0)
    events = []
    for rank, spans in spans_by_rank.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(["main", *(s.lane for s in spans)]))}
        for lane, tid in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}})
        for s in spans:
            times = {"ts": (s.start_s - origin_s) * 1e6, "dur": (s.end_s - s.start_s) * 1e6}
            events.append(
                {"ph": "X", "name": s.name, "cat": s.kind, "pid": rank, "tid": lanes[s.lane], **times}
            )
    return events


def write_chrome_trace(path: str | Path, spans_by_rank: dict[int, list[Span]]) -> None:
    """Write a JSON file that Perfetto and chrome://tracing open."""
    Path(path).write_text(json.dumps({"traceEvents": chrome_events(spans_by_rank), "displayTimeUnit": "ms"}))
