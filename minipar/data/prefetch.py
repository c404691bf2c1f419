"""Batches made on a thread, a few steps ahead, so that the computation does not wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
AHEAD = 4  # batches made before their step, so that one slow read is not waited for


def prefetch_batches(make: Callable[[int], T], steps: range) -> Generator[tuple[int, T], None, None]:
    """Yield (step, make(step)) in order, while a thread makes the batches of the next AHEAD steps, one after the other.

    An error that `make` raises is raised here, at its step. The thread ends with the iterator, which does not wait for
    batches that are not begun: close it to leave early.
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
