"""Ranks as threads of one process that run one at a time: a rank runs until it has to wait for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Stuck(RuntimeError):
    """No rank can go on: each that has not ended waits for something that none of the others has done."""


class Turns:
    """Run functions in threads, one at a time. A function gives its turn away by `wait_until`."""

    def __init__(self) -> None:
        self._back = threading.Semaphore(0)  # released when the turn is given back
        self._go: dict[int, threading.Semaphore] = {}
        self._waits: dict[int, Callable[[], bool] | None] = {}
        self._stuck = False

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()`; let the other ranks run until then. Raises Stuck if they cannot make it so."""
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
        """Run the functions in their order, each as far as it can; return when all have returned.

        A function must not raise. What waits when nothing else can run gets Stuck from `wait_until`.
        """
        threads = [
            threading.Thread(target=self._run, args=(function,), daemon=True) for function in functions
        ]
        for thread in threads:  # each first runs when it is started
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
