"""Problems for pen and paper, with random numbers, from problems.toml.

The answer comes from minipar.cost, or from a formula that the problem states; its worked lines end in a calculation with
the numbers put in. Tests evaluate that calculation, and compute every answer in another way.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from pathlib import Path
from random import Random
from string import Formatter
from typing import Any, NamedTuple

from minipar.cost import collectives
from minipar.cost.machines import find_machine
from minipar.cost.model_table import find_model
from minipar.learn.expressions import FUNCTIONS

# What the expressions in problems.toml may use besides their own numbers.
NAMES = FUNCTIONS | vars(collectives)
NAMES |= dict(find_machine=find_machine, find_model=find_model, ceil=ceil, log2=log2, sqrt=sqrt)
NAMES |= dict(MICRO=1e-6, GIGA=1e9, TERA=1e12, DAY_S=86400)


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
    within: float


class _Evaluating(Formatter):
    """Formats "{p - 1} ranks": what is in braces is an expression."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return eval(field_name, dict(kwargs)), field_name


@dataclass(frozen=True)
class Problem:
    """A problem of one lesson. Called with a random number generator, it returns a Card."""

    name: str
    lesson: str
    values: dict[str, tuple[Any, ...]]
    question: str
    answer: str
    unit: str
    worked: tuple[str, ...]
    where: tuple[str, ...] = ()
    within: float = 0.03

    def of(self, **numbers: Any) -> Card:
        known = NAMES | numbers
        for definition in self.where:
            exec(definition, known)

        def say(text: str) -> str:
            return _Evaluating().vformat(text, (), known)

        worked = tuple(map(say, self.worked))
        return Card(say(self.question), eval(self.answer, known), say(self.unit), worked, self.within)

    def draw(self, rng: Random) -> dict[str, Any]:
        """Return a random value for each of the problem's numbers."""
        return {name: rng.choice(choices) for name, choices in self.values.items()}

    def __call__(self, rng: Random) -> Card:
        return self.of(**self.draw(rng))


def _problem(values: dict[str, Any], **of_toml: Any) -> Problem:
    return Problem(values={name: _tuples(choices) for name, choices in values.items()}, **of_toml)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


PROBLEMS = tuple(
    _problem(**of_toml)
    for of_toml in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["problem"]
)
LESSONS = tuple(dict.fromkeys(problem.lesson for problem in PROBLEMS))
