"""Batches made on a thread, a few steps ahead, so that the computation does not wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
AHEAD = 4  # number of batches made in advance, so that one slow read does not delay a step


def prefetch_batches(make: Callable[[int], T], steps: range) -> Generator[tuple[int, T], None, None]:
    """Yield (step, make(step)) in order, while a thread makes the batches of the next AHEAD steps, one after the other.

    An error that `make` raises is raised here, at its step. To leave early, close the iterator: the thread then ends, and
    does not make the batches that it has not begun.
    """
    thread = ThreadPoolExecutor(1, "batches")
    try:
        todo = iter(steps)
        ahead = deque((step, thread.submit(make, step)) for step in islice(todo, AHEAD))
        while ahead:
            step, made = ahead.popleft()
            batch = made.result()
            ahead.extend((later, thread.submit(make, later)) for later in islice(todo, 1))
            yield step, batch
    finally:
        thread.shutdown(cancel_futures=True)
