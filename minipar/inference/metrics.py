"""Metrics of a service, computed from its log alone.

    time to first token      first token - arrival: the queue, and the prefill
    inter-token latency      the time between two steps that gave a request tokens, divided by the later step's tokens
    time per output token    of a request: (last token - first token) / (tokens - 1), the mean of its gaps
    end to end               last token - arrival
    throughput               generated tokens per second of all requests, from the first arrival to the last token
    goodput                  requests per second that met their targets; 0 for a server that is late for all of them

P50 is the smallest value such that at least half of all values do not exceed it, and P99 likewise for 99 of 100.

Source: DistServe, arXiv:2401.09670, section 2 (latencies, goodput).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minipar.inference.events import Event, Kind


@dataclass
class Times:
    """One request's times, in seconds."""

    arrival_s: float
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    num_tokens: int = 0
    gaps_s: tuple[float, ...] = ()  # one for each token after the first

    @property
    def to_first_token_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def per_output_token_s(self) -> float:
        return (
            (self.last_token_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0
        )

    @property
    def end_to_end_s(self) -> float:
        return self.last_token_s - self.arrival_s


@dataclass(frozen=True)
class Spread:
    """Mean, median, 99th percentile and largest of some values; all 0 if there are none."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        at = [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99, 1.0)]
        return cls(sum(ordered) / len(ordered), *at)


@dataclass(frozen=True)
class Metrics:
    """A service's figures. Times are in seconds; requests that were refused or are unfinished are not counted."""

    num_finished: int
    num_refused: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    goodput_per_s: float
    to_first_token_s: Spread
    per_output_token_s: Spread
    inter_token_s: Spread
    end_to_end_s: Spread
    preemptions: int
    prefix_hit_rate: float  # tokens found in the prefix cache / (these tokens + tokens prefilled)
    acceptance_rate: float  # drafts that were right / drafts verified


def metrics_of(
    events: Sequence[Event], first_token_target_s: float = math.inf, per_token_target_s: float = math.inf
) -> Metrics:
    """Compute the metrics of a log. A request counts for goodput if both of its times are within the targets."""
    times = [times for times in request_times(events).values() if not math.isnan(times.last_token_s)]
    begin = min((t.arrival_s for t in times), default=0.0)
    seconds = max((t.last_token_s for t in times), default=0.0) - begin
    counts: dict[Kind, int] = defaultdict(int)
    for event in events:
        counts[event.kind] += event.num_tokens
    good = sum(
        t.to_first_token_s <= first_token_target_s and t.per_output_token_s <= per_token_target_s
        for t in times
    )
    num_tokens = sum(t.num_tokens for t in times)
    return Metrics(
        num_finished=len(times),
        num_refused=sum(event.kind == Kind.REFUSE for event in events),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_s=_ratio(num_tokens, seconds),
        goodput_per_s=_ratio(good, seconds),
        to_first_token_s=Spread.of(t.to_first_token_s for t in times),
        per_output_token_s=Spread.of(t.per_output_token_s for t in times if t.num_tokens > 1),
        inter_token_s=Spread.of(gap for t in times for gap in t.gaps_s),
        end_to_end_s=Spread.of(t.end_to_end_s for t in times),
        preemptions=sum(event.kind == Kind.PREEMPT for event in events),
        prefix_hit_rate=_ratio(counts[Kind.HIT], counts[Kind.HIT] + counts[Kind.PREFILL]),
        acceptance_rate=_ratio(counts[Kind.ACCEPTED], counts[Kind.GUESSED]),
    )


def request_times(events: Iterable[Event]) -> dict[int, Times]:
    """Return the times of each request that arrived, by its number; last_token_s is set only for a finished request."""
    times: dict[int, Times] = {}
    wrote_s: dict[int, float] = {}
    for event in events:
        if event.kind == Kind.ARRIVE:
            times[event.number] = Times(event.end_s)
        elif event.kind == Kind.WRITE:
            own = times[event.number]
            if own.num_tokens == 0:
                own.first_token_s = wrote_s[event.number] = event.end_s
            gap = (event.end_s - wrote_s[event.number]) / event.num_tokens
            own.gaps_s += (gap,) * (event.num_tokens if own.num_tokens else event.num_tokens - 1)
            own.num_tokens += event.num_tokens
            wrote_s[event.number] = event.end_s
        elif event.kind == Kind.FINISH:
            times[event.number].last_token_s = event.end_s
    return times


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
