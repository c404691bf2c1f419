"""Batches made on a thread, one step ahead, so that reading and cutting them takes no time from the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def made_ahead(make: Callable[[int], T], steps: range) -> Iterator[tuple[int, T]]:
    """Yield (step, make(step)) in order, while a thread makes that of the next step.

    What `make` raises is raised here, at its step. The thread ends with the iterator: close that where it is left early.
    """
    with ThreadPoolExecutor(1, "batches") as thread:
        ahead = thread.submit(make, steps[0]) if steps else None
        for step in steps:
            made = ahead.result()
            if step + steps.step in steps:
                ahead = thread.submit(make, step + steps.step)
            yield step, made
