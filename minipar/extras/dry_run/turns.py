"""Ranks as threads of one process, of which one runs at a time: until it has to wait for another rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Semaphore, Thread

Ready = Callable[[], bool]


class Stuck(RuntimeError):
    """No rank can go on: every rank that has not ended waits for another rank."""


class Turns:
    """Run functions in threads, one at a time. A function gives up its turn by calling `wait_until`."""

    def __init__(self) -> None:
        self._back = Semaphore(0)  # released when the turn is given back
        self._waiting: list[tuple[Ready, Semaphore]] = []
        self._stuck = False

    def wait_until(self, ready: Ready) -> None:
        """Let the other ranks run until `ready()` is true. Raises Stuck if none can run and it is still false."""
        if ready():
            return
        go = Semaphore(0)
        self._waiting.append((ready, go))
        self._back.release()
        go.acquire()
        if self._stuck:
            raise Stuck("no other rank goes on")

    def run(self, functions: Iterable[Callable[[], None]]) -> None:
        """Run the functions in their order, each until it waits or returns; return when all have returned.

        A function must not raise. If all wait and none can go on, `wait_until` raises Stuck in each of them.
        """
        for function in functions:
            Thread(target=self._run, args=(function,), daemon=True).start()
            self._back.acquire()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            self._stuck = not any(ready() for ready, _ in waiting)
            for ready, go in waiting:
                if self._stuck or ready():
                    go.release()
                    self._back.acquire()
                else:
                    self._waiting.append((ready, go))

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        finally:
            self._back.release()
