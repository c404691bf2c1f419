"""A problem: a question about random numbers, its answer, and the calculation by hand.

A problem is a function; its parameters are the numbers. `@problem` states its lesson, and the values that each number may
take; every combination of these is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple


class Card(NamedTuple):
    """A question with its numbers, the answer in `unit`, and the lines that lead to it.

    worked  one or more lines of formulas and, as the last line, the calculation with the numbers put in: a Python
            expression whose value is the answer in `unit`
    within  the relative tolerance; 0 for counts
    """

    question: str
    answer: float
    unit: str
    worked: tuple[str, ...]
    within: float = 0.03


@dataclass(frozen=True)
class Problem:
    """A problem of one lesson. Called with a random number generator, it returns a Card."""

    lesson: str
    values: dict[str, tuple[Any, ...]]
    of: Callable[..., Card]

    @property
    def name(self) -> str:
        return self.of.__name__

    def draw(self, rng: Random) -> dict[str, Any]:
        """Return a random value for each parameter of the problem."""
        return {name: rng.choice(choices) for name, choices in self.values.items()}

    def __call__(self, rng: Random) -> Card:
        return self.of(**self.draw(rng))


def problem(lesson: str, **values: tuple[Any, ...]) -> Callable[[Callable[..., Card]], Problem]:
    """Turn a function into a problem. `values`: for each of its parameters, the values that may be drawn."""
    return lambda function: Problem(lesson, values, function)
