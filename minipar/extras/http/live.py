"""Serve requests that clients submit and cancel while the ranks run.

    a client's thread      Desk.submit, Desk.cancel
    the ranks, each step   rank 0 reports the new tokens to the Desk, which returns new requests; rank 0 broadcasts these to
                           all ranks

All ranks add and cancel the same requests before the same step, so they still make the same plans without a message.
The Desk is one lock around a few dictionaries, and does not depend on HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minipar.comm import Comm
from minipar.comm.objects import broadcast_object
from minipar.inference.draft_choice import DraftChoice
from minipar.inference.engine import Engine, Options, Result
from minipar.inference.events import Event, Kind
from minipar.inference.request import Request
from minipar.inference.serve import MeshSizes, make_engine
from minipar.train.checkpoint.restore import CheckpointRef


class News(NamedTuple):
    """The result of `Desk.answer`: new (id, request) pairs, ids of requests to cancel, and whether the Desk has closed."""

    arrived: tuple[tuple[int, Request], ...] = ()
    cancelled: tuple[int, ...] = ()
    closed: bool = False


class Progress(NamedTuple):
    """Rank 0's report to `Desk.answer`: the events since the last report, and the cache blocks in use.

    written  request id -> its new tokens, if it has any
    refused  request id -> why it cannot be served, or served further
    """

    events: tuple[Event, ...] = ()
    written: dict[int, list[int]] = {}
    refused: dict[int, str] = {}
    num_running: int = 0
    num_waiting: int = 0  # requests that hold no block
    num_blocks: int = 0  # blocks that requests hold
    num_prefix_blocks: int = 0  # blocks that only the prefix cache holds

    @property
    def is_idle(self) -> bool:
        return self.num_running + self.num_waiting == 0


class Heard(NamedTuple):
    """A message to a client: new tokens and whether they are the last, or the reason why no more will come."""

    tokens: list[int]
    is_last: bool = False
    error: str | None = None
    was_refused: bool = False  # True if the engine refused the request; False if the service ended


class QueueFull(Exception):
    pass


class Closed(Exception):
    pass


@dataclass
class _Open:
    """A request that is not finished."""

    listener: Callable[[Heard], None]
    arrived_s: float
    has_written: bool = False


BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class FirstTokenTimes:
    """A histogram of the time from a request's arrival to its first token."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last count is for times above all bounds
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[sum(seconds > bound for bound in BOUNDS_S)] += 1
        self.sum_s += seconds


@dataclass
class Totals:
    """Counts since the Desk was made."""

    finished: int = 0
    refused: int = 0
    cancelled: int = 0
    turned_away: int = 0
    prompt_tokens: int = 0
    written_tokens: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    first_token: FirstTokenTimes = field(default_factory=FirstTokenTimes)

    def add(self, event: Event) -> None:
        if event.kind == Kind.FINISH:
            self.finished += 1
        elif event.kind in (Kind.REFUSE, Kind.FAIL):
            self.refused += 1
        elif event.kind == Kind.CANCEL:
            self.cancelled += 1
        elif event.kind == Kind.ARRIVE:
            self.prompt_tokens += event.num_tokens
        elif event.kind == Kind.WRITE:
            self.written_tokens += event.num_tokens
        elif event.kind == Kind.HIT:
            self.prefix_tokens += event.num_tokens
        elif event.kind == Kind.PREEMPT:
            self.preemptions += 1


class Desk:
    """The queue between clients, which submit requests, and ranks, which fetch them. All methods are thread-safe.

    max_open  maximum number of unfinished requests; beyond it, `submit` raises QueueFull
    idle_s    how long `answer` waits for a new request if the ranks are idle; must be below the ranks' message timeout
    """

    def __init__(self, max_open: int, idle_s: float = 1.0):
        self.max_open, self.idle_s = max_open, idle_s
        self.totals = Totals()
        self.progress = Progress()
        self.is_ready = False  # the ranks have asked at least once
        self.is_closed = False
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._arrived: list[tuple[int, Request]] = []
        self._cancelled: list[int] = []
        self._complete: set[int] = set()  # those of the cancelled requests whose texts were complete
        self._next = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: Request, listener: Callable[[Heard], None]) -> int:
        """Queue a request and return its id. `listener` is called with each message about it, in the ranks' thread.

        Raises QueueFull if max_open requests are open already, Closed if the Desk has closed.
        """
        with self._changed:
            if self.is_closed:
                raise Closed
            if len(self._open) >= self.max_open:
                self.totals.turned_away += 1
                raise QueueFull
            number, self._next = self._next, self._next + 1
            self._open[number] = _Open(listener, time.monotonic())
            self._arrived.append((number, request))
            self._changed.notify_all()
            return number

    def cancel(self, number: int, is_complete: bool = False) -> None:
        """Cancel a request, so that its listener is not called again. Do nothing if the request is finished.

        is_complete  the client has its whole text, which ended at a stop string: the request counts as finished
        """
        with self._changed:
            if self._open.pop(number, None) is not None:
                self._cancelled.append(number)
                if is_complete:
                    self._complete.add(number)
                self._changed.notify_all()

    def answer(self, rank: int, progress: Progress) -> News:
        """Pass rank 0's progress on to the listeners, and return new requests; if the ranks are idle, wait for one."""
        with self._changed:
            self.is_ready, self.progress = True, progress
            for event in progress.events:
                if event.kind in (Kind.FINISH, Kind.CANCEL) and event.number in self._complete:
                    self._complete.remove(event.number)
                    event = event._replace(kind=Kind.FINISH)
                self.totals.add(event)
            for number in {event.number: None for event in progress.events}:
                self._tell(number, progress)
            if progress.is_idle and not (self._arrived or self._cancelled or self.is_closed):
                self._changed.wait(self.idle_s)
            news = News(tuple(self._arrived), tuple(self._cancelled), self.is_closed)
            self._arrived, self._cancelled = [], []
            return news

    def _tell(self, number: int, progress: Progress) -> None:
        if (client := self._open.get(number)) is None:
            return
        tokens, error = progress.written.get(number, []), progress.refused.get(number)
        if tokens and not client.has_written:
            client.has_written = True
            self.totals.first_token.add(time.monotonic() - client.arrived_s)
        ends = any(event.number == number and event.kind == Kind.FINISH for event in progress.events)
        if ends or error is not None:
            del self._open[number]
        if tokens or ends or error is not None:
            refused = any(event.number == number and event.kind == Kind.REFUSE for event in progress.events)
            client.listener(Heard(tokens, ends, error, was_refused=refused))

    def close(self, why: str = "the server is stopping") -> None:
        """Accept no more requests, and cancel the open ones; their listeners get `why` as the error."""
        with self._changed:
            self.is_closed = True
            for number, client in self._open.items():
                client.listener(Heard([], error=why))
                self._cancelled.append(number)
            self._open.clear()
            self._changed.notify_all()


def serve_live(engine: Engine, exchange: Callable[[Progress], News]) -> None:
    """Serve the requests that `exchange` returns before each step, until it reports that the Desk has closed.

    exchange  called on every rank; uses only rank 0's argument, and returns the same result on all ranks
    """
    results: dict[int, Result] = {}

    def more() -> bool:
        news = exchange(_progress(engine, results))
        for event in engine.events:
            if event.kind in (Kind.FINISH, Kind.FAIL, Kind.REFUSE, Kind.CANCEL):
                results.pop(event.number, None)
        engine.events.clear()
        engine.steps.clear()  # otherwise a server's log would grow without bound
        for number, request in news.arrived:
            results[number] = Result()
            engine.add(number, replace(request, arrival_s=engine.now_s), results)
        for number in news.cancelled:
            engine.cancel(number)
        # Requests that were just refused or cancelled must still be reported.
        return not news.closed or bool(engine.events)

    for _ in engine.iterate([], results, more):
        pass


def _progress(engine: Engine, results: dict[int, Result]) -> Progress:
    sequences, events = engine.scheduler.sequences, tuple(engine.events)
    held = {block for sequence in sequences for block in sequence.table}
    waiting = sum(not sequence.table for sequence in sequences)
    return Progress(
        events,
        {e.number: results[e.number].tokens[-e.num_tokens :] for e in events if e.kind == Kind.WRITE},
        {e.number: results[e.number].error or "" for e in events if e.kind in (Kind.REFUSE, Kind.FAIL)},
        len(sequences) - waiting,
        waiting,
        len(held),
        engine.pool.num_blocks - engine.pool.num_free - len(held),
    )


def serve_rank(
    world: Comm, chosen: CheckpointRef, sizes: MeshSizes, options: Options, draft: DraftChoice | None
) -> None:
    """Serve, as one rank of `world`, the requests of the Desk in the process that launched the ranks."""

    def exchange(progress: Progress) -> News:
        news: News = broadcast_object(world, world.ask(progress) if world.rank == 0 else None)
        return news

    serve_live(make_engine(world, chosen, sizes, options, draft), exchange)
