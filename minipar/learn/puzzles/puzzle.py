"""The description of a puzzle: its texts, its network and, for each number of ranks, inputs, expected results, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minipar.learn.puzzles.network import Network, World
from minipar.learn.puzzles.values import Parts, listed


class Wanted(NamedTuple):
    """The value that a rank must return; the fields are those of `Value`."""

    of: str
    blocks: tuple[tuple[int, Parts], ...]


class Limit(NamedTuple):
    """A limit of a puzzle: the largest value that passes, the best known value, and the formula of the best."""

    most: float
    best: float
    formula: str


class Job(NamedTuple):
    """A puzzle on a certain number of ranks.

    inputs       rank -> new arguments for its program, after `comm`
    wanted       rank -> the expected result: a Wanted, or a tuple or list of them
    sent         limit on the bytes that the busiest rank sends
    seconds      limit on the time until the last rank is done
    memory       for each rank, the limit on the bytes that it holds; None: not limited
    """

    inputs: Callable[[int], tuple[Any, ...]]
    wanted: Callable[[int], Any]
    sent: Limit
    seconds: Limit
    memory: tuple[Limit, ...] | None = None


@dataclass(frozen=True)
class Puzzle:
    """A puzzle. Task and hints are Markdown. The learner's program is tried on each number of ranks in `sizes`.

    `given` says how large values are, and how long computing takes.
    """

    name: str
    title: str
    minutes: int
    lesson: str
    task: str
    given: str
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

    @property
    def conditions(self) -> str:
        """The conditions in sentences: sizes, numbers of ranks, the network, and which memory counts as held."""
        first, *more = self.sizes
        sentences = [self.given, f"The program runs on {first} ranks, and then on {listed(map(str, more))}."]
        network = self.network(first)
        sentences.append(network.described())
        if self.job(World(first, network)).memory is not None:
            sentences.append(
                "Memory is what your variables refer to whenever the program waits; a message on its way costs none."
            )
        return " ".join(sentences)
