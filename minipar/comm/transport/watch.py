"""Deadlines on a GPU: a thread checks whether the operations that were put on CUDA streams end in time.

The host does not wait for a GPU's operations, so it does not notice that an operation never ends; it hangs when it next
reads a value. NCCL's own watchdog then ends the process without saying what was missing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from minipar.comm.transport.messages import ChannelId


class Event(Protocol):
    """A point in a CUDA stream: `query()` returns whether the stream has passed it."""

    def query(self) -> bool: ...


class Stuck(NamedTuple):
    """An operation that has begun but not ended in time; `number` operations were put on its channel before it."""

    what: str
    channel: ChannelId
    number: int
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.what} on {self.channel} (operation {self.number}) has not ended after {self.timeout_s:g} s"


@dataclass
class _Pending:
    what: str
    channel: ChannelId
    number: int
    begin: Event
    end: Event
    begun_s: float | None = None  # when it was first seen to have begun


class Watch:
    """A record of the operations under way on this rank's streams, one stream per channel.

    timeout_s  seconds that an operation may take once it has begun on the GPU. Before that, the operation waits for this
               rank's own work, which may take long; once begun, it waits only for other ranks
    on_stuck   called once, from the thread, with the first operation that takes longer
    counts     operations put on each channel's stream so far. A rank with a lower count than the other ranks has not called
               the operation in which they wait
    """

    def __init__(
        self,
        timeout_s: float,
        on_stuck: Callable[[Stuck], None],
        now: Callable[[], float] = time.monotonic,
    ):
        self.timeout_s = timeout_s
        self.counts = Counter[ChannelId]()
        self._on_stuck = on_stuck
        self._now = now
        self._pending: dict[ChannelId, deque[_Pending]] = {}  # a channel's operations, in order
        self._ended = threading.Event()

    def start(self, device: torch.device, every_s: float = 0.1) -> None:
        threading.Thread(target=self._look_again, args=(device, every_s), name="watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def add(self, what: str, channel: ChannelId, begin: Event, end: Event) -> None:
        """Watch an operation that was put on the channel's stream, between two events."""
        number = self.counts[channel]
        self.counts[channel] += 1
        self._pending.setdefault(channel, deque()).append(_Pending(what, channel, number, begin, end))

    def look(self) -> Stuck | None:
        """Forget the operations that have ended; return one that is past its deadline, or None."""
        for pending in list(self._pending.values()):
            while pending and pending[0].end.query():
                pending.popleft()
            if pending and (stuck := self._judge(pending[0])):
                return stuck
        return None

    def _judge(self, first: _Pending) -> Stuck | None:
        if first.begun_s is None:
            first.begun_s = self._now() if first.begin.query() else None
        elif self._now() - first.begun_s > self.timeout_s:
            return Stuck(first.what, first.channel, first.number, self.timeout_s)
        return None

    def _look_again(self, device: torch.device, every_s: float) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # otherwise the thread would use GPU 0
        while not self._ended.wait(every_s):
            if stuck := self.look():
                self._on_stuck(stuck)
                return


def ranks_behind(stuck: Stuck, counts: dict[int, dict[ChannelId, int]]) -> list[int]:
    """Return the members of the channel that have not called the stuck operation, according to their `counts`."""
    channel, number = stuck.channel, stuck.number
    return [rank for rank in channel.ranks if rank in counts and counts[rank].get(channel, 0) <= number]
