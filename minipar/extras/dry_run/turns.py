"""Ranks as threads of one process, of which one runs at a time: until it has to wait for another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Stuck(RuntimeError):
    """No rank can go on: every rank that has not ended waits for another rank."""


class Turns:
    """Run functions in threads, one at a time: who runs holds the lock. A function gives it up in `wait_until`."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._waits: list[Callable[[], bool]] = []
        self._left = 0  # number of functions that have not returned
        self._stuck = False

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let the other ranks run until `ready()` is true. Raises Stuck if none can run and it is still false."""
        self._waits.append(ready)
        self._pass_on()
        self._turn.wait_for(lambda: self._stuck or ready())
        self._waits.remove(ready)
        if not ready():
            raise Stuck("no other rank goes on")

    def _pass_on(self) -> None:
        """Wake the ranks that wait, since what they wait for may have happened; or find that all wait in vain."""
        self._stuck = len(self._waits) == self._left and not any(ready() for ready in self._waits)
        self._turn.notify_all()

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run the functions; return when all have returned. A function must not raise.

        If all wait and none can go on, `wait_until` raises Stuck in each of them.
        """
        self._left = len(functions)
        threads = [
            threading.Thread(target=self._run, args=(function,), daemon=True) for function in functions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, function: Callable[[], None]) -> None:
        with self._turn:
            try:
                function()
            finally:
                self._left -= 1
                self._pass_on()
