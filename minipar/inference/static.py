"""Static batching, for comparison: requests enter together, and leave when the longest of them is done.

    continuous   when a request is finished, another one takes its slot in the batch at the next step
    static       the slot of a finished request computes padding, one token per step, until the batch ends

A batch of B requests that generate n_1 ... n_B tokens takes max(n) steps, the first of which prefills all prompts. Of its
B max(n) slots, counted over all steps, B max(n) - sum(n) are padding, however long the prompts are.

Time is counted in steps, so that the comparison is the same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from minipar.inference.events import Event, Kind, StepCounts
from minipar.support.errors import require_positive


class Places(NamedTuple):
    """The use of a batch's slots.

    num_steps    steps from the first arrival to the last token
    num_working  slots that process tokens of a request, summed over all steps
    size         slots in a step
    """

    num_steps: int
    num_working: int
    size: int

    @property
    def share(self) -> float:
        return self.num_working / (self.num_steps * self.size) if self.num_steps else 0.0


def in_steps(events: Sequence[Event], steps: Sequence[StepCounts]) -> list[Event]:
    """Return the log with times counted in steps: step i lasts from i to i + 1, and idle time is left out.

    If g steps are in flight at once (`rotation.py`), step i lasts from i / g to i / g + 1.
    """
    begins = [step.begin_s for step in steps]
    together = max([1, *(bisect_left(begins, step.end_s) - i for i, step in enumerate(steps))])
    return [
        event._replace(
            begin_s=bisect_left(begins, event.begin_s) / together,
            end_s=bisect_left(begins, event.end_s) / together,
        )
        for event in events
    ]


def static_batches(events: Sequence[Event], batch_size: int) -> list[Event]:
    """Return the log of serving the finished requests of `events` in static batches. Times of both logs are in steps.

    Requests are put into batches in order of arrival. A batch begins when the one before it has ended and all of its
    requests have arrived. Its first step prefills every prompt; each step gives each unfinished request a token.
    Raises ValueError unless the size is positive.
    """
    require_positive(batch_size=batch_size)
    arrived = {event.number: event for event in events if event.kind == Kind.ARRIVE}
    written = {event.number: event.num_tokens for event in events if event.kind == Kind.FINISH}
    waiting = sorted(written, key=lambda number: (arrived[number].begin_s, number))
    log, now = [arrived[number] for number in waiting], 0.0
    for first in range(0, len(waiting), batch_size):
        batch = waiting[first : first + batch_size]
        begin = max(now, *(arrived[number].begin_s for number in batch))
        now = begin + max(written[number] for number in batch)
        for number in batch:
            log += _row(arrived[number], written[number], begin, now)
    return sorted(log, key=lambda event: event.end_s)


def _row(arrived: Event, num_tokens: int, begin: float, end: float) -> list[Event]:
    """Return the events of one slot (row) of a batch that lasts from `begin` to `end`."""
    number, finished = arrived.number, begin + num_tokens
    row = [Event(Kind.PREFILL, number, begin, begin + 1, arrived.num_tokens)]
    row += [Event(Kind.DECODE, number, begin + i, begin + i + 1, 1) for i in range(1, num_tokens)]
    row += [Event(Kind.WRITE, number, begin + i + 1, begin + i + 1, 1) for i in range(num_tokens)]
    row.append(Event(Kind.FINISH, number, finished, finished, num_tokens))
    if finished < end:
        row.append(Event(Kind.PAD, number, finished, end, int(end - finished)))
    return row


def places_of(events: Sequence[Event], batch_size: int) -> Places:
    """Return the use of the batch slots in a log with times in steps (`in_steps`).

    Idle steps, in which a static batch waits for requests, count too.
    """
    spans = [event for event in events if event.kind in (Kind.PREFILL, Kind.DECODE)]
    if not spans:
        return Places(0, 0, batch_size)
    begin = min(event.begin_s for event in events if event.kind == Kind.ARRIVE)
    num_steps = max(event.end_s for event in spans) - begin
    working = sum(event.end_s - event.begin_s for event in spans)
    return Places(round(num_steps), round(working), batch_size)
