"""Ranks as threads of one process, of which one runs at a time: until it has to wait for another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Stuck(RuntimeError):
    """No rank can go on: every rank that has not ended waits for another rank."""


class Turns:
    """Run functions in threads, one at a time. A function gives up its turn by calling `wait_until`."""

    def __init__(self) -> None:
        self._back = threading.Semaphore(0)  # released when the turn is given back
        self._go: dict[int, threading.Semaphore] = {}
        self._waits: dict[int, Callable[[], bool] | None] = {}
        self._stuck = False

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let the other ranks run until `ready()` is true. Raises Stuck if none can run and it is still false."""
        me = threading.get_ident()
        if ready():
            return
        self._waits[me] = ready
        self._back.release()
        self._go[me].acquire()
        self._waits[me] = None
        if self._stuck:
            raise Stuck("no other rank goes on")

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run the functions in their order, each until it waits or returns; return when all have returned.

        A function must not raise. If all wait and none can go on, `wait_until` raises Stuck in each of them.
        """
        threads = [
            threading.Thread(target=self._run, args=(function,), daemon=True) for function in functions
        ]
        for thread in threads:  # starting a thread gives it its first turn
            thread.start()
            self._back.acquire()
        while waiting := [t for t in threads if t.is_alive() and t.ident in self._waits]:
            ready = [t for t in waiting if self._is_ready(t)]
            self._stuck = not ready
            for thread in ready or waiting:
                assert thread.ident is not None
                self._go[thread.ident].release()
                self._back.acquire()
        for thread in threads:
            thread.join()

    def _is_ready(self, thread: threading.Thread) -> bool:
        assert thread.ident is not None
        ready = self._waits[thread.ident]
        return ready is not None and ready()

    def _run(self, function: Callable[[], None]) -> None:
        me = threading.get_ident()
        self._go[me] = threading.Semaphore(0)
        self._waits[me] = None
        try:
            function()
        finally:
            del self._waits[me]
            self._back.release()
