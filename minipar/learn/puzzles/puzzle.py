"""What a puzzle is: its texts, its network, and for each number of ranks inputs, the result that is wanted, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minipar.learn.puzzles.network import Network, World
from minipar.learn.puzzles.values import Parts


class Wanted(NamedTuple):
    """A value as a rank must return it."""

    of: str
    blocks: tuple[tuple[int, Parts], ...]


class Limit(NamedTuple):
    """The most that passes, the best known, and how the best is computed."""

    most: float
    best: float
    formula: str


class Job(NamedTuple):
    """A puzzle on a number of ranks.

    inputs       rank -> the arguments of its program after `comm`, made anew
    wanted       rank -> what it must return: a Wanted, a Value's description, or a tuple or list of them
    sent         bytes that the busiest rank sends
    seconds      until the last rank is done
    memory       for each rank, the most bytes that it holds; None: not limited
    """

    inputs: Callable[[int], tuple[Any, ...]]
    wanted: Callable[[int], Any]
    sent: Limit
    seconds: Limit
    memory: tuple[Limit, ...] | None = None


@dataclass(frozen=True)
class Puzzle:
    """A program for one rank to write. Task and hints are Markdown; `sizes` are the numbers of ranks it is tried on."""

    name: str
    title: str
    minutes: int
    lesson: str
    task: str
    stub: str
    hints: tuple[str, ...]
    answer: str
    sizes: tuple[int, ...]
    job: Callable[[World], Job]
    network: Callable[[int], Network] = lambda num_ranks: Network()
    has_collectives: bool = True

    @property
    def signature(self) -> str:
        """The line `async def program(...):` of the stub."""
        return next(line for line in self.stub.splitlines() if line.startswith("async def program"))
