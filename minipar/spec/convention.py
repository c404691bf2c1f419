"""Conventions: what an implementation may state, to be judged by it instead of by what one process does.

    @conventions("equal lengths", "two ranks or more")
    def reduce_scatter(comm, x): ...

They are said in the report. A specification names those that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from inspect import isroutine
from types import SimpleNamespace
from typing import Any

CONVENTIONS = {
    "two ranks or more": "one rank alone is not asked",
    "in place": "it may write to the tensors it is given, which are contiguous, and return them",
    "equal lengths": "lengths are equal on all ranks, and the number of ranks divides them",
    "partial gradients": "of what all ranks hold, each gets its summand of the gradient; to add them is left to the caller",
    "mean of means": "every rank's mean counts alike, however many tokens it is of",
    "any tree": "the number of rounds is not asked",
    "p microbatches or more": "fewer microbatches than ranks are not asked",
    "contiguous": "what is sent on is contiguous",
    "header": "a few bytes more may go to each neighbour",
}
ALWAYS = ("two ranks or more", "in place")  # every specification knows them


def conventions(*names: str) -> Callable[[Any], Any]:
    """Return a decorator that states these conventions. Raises ValueError for one that there is not."""
    if unknown := [name for name in names if name not in CONVENTIONS]:
        raise ValueError(f"conventions={unknown[0]!r}: there are {', '.join(CONVENTIONS)}")

    def state(implementation: Any) -> Any:
        both = tuple(dict.fromkeys((*names, *getattr(implementation, "conventions", ()))))
        # Another function or class, with which what is stated goes to the ranks.
        if isinstance(implementation, type):
            return type(
                implementation.__name__,
                (implementation,),
                {"conventions": both, "__module__": implementation.__module__},
            )
        stating: Any = (
            implementation if isroutine(implementation) else copy(implementation)
        )  # with its methods
        if stating is implementation or not hasattr(stating, "__dict__"):
            stating = wraps(implementation)(lambda *args, **options: implementation(*args, **options))
        stating.conventions = both
        return stating

    return state


def stated(implementation: Any) -> tuple[str, ...]:
    """Return the conventions that an implementation states, or that those of several functions state together."""
    several = [implementation]
    if isinstance(implementation, SimpleNamespace):
        several += vars(implementation).values()
    return tuple(dict.fromkeys(name for one in several for name in getattr(one, "conventions", ())))
