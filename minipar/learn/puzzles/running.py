"""Run a learner's source on every rank of a simulated world, and stop it where it never ends."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from minipar.learn.puzzles.network import PROGRAM, Stopped, World, line_of_error, line_of_program
from minipar.learn.puzzles.puzzle import Job, Puzzle
from minipar.learn.puzzles.values import Fault

MOST_LINES = 100_000  # of the learner's program, on all ranks together
MOST_PRINTED = 200


class EndlessLoop(BaseException):
    """The budget of lines is spent. Not an Exception, so that a program's own `except Exception` lets it pass."""


@dataclass(frozen=True)
class Run:
    """What happened in one run: each rank's result, or what stopped it."""

    world: World
    job: Job
    results: list[Any]
    stopped: Stopped | None
    printed: list[str]
    forgotten: list[tuple[int, str, int | None]]  # calls without await: rank, name, line


def compiled(source: str) -> CodeType:
    """Compile a learner's source. Raises SyntaxError."""
    return compile(source, PROGRAM, "exec", dont_inherit=True)


def run(puzzle: Puzzle, code: CodeType, num_ranks: int) -> Run:
    """Run the program on this many ranks, each with globals of its own. What it raises is in `stopped`."""
    world = World(num_ranks, puzzle.network(num_ranks))
    job = puzzle.job(world)
    printed: list[str] = []
    tasks, stopped = [], None
    rank = 0
    with limited_lines():
        try:
            for rank in range(num_ranks):
                comm = world.comms[rank]
                comm._has_collectives = puzzle.has_collectives
                program = _program(code, puzzle, _printer(rank, printed))
                # The list of arguments is the program's alone: what it deletes is gone.
                tasks.append(world.start(program(comm, *job.inputs(rank)), rank))
            world.run()
        except Stopped as error:
            stopped = error
        except (Exception, EndlessLoop, SystemExit) as error:
            stopped = Stopped(rank, line_of_error(error), error)
        forgotten = list(world.forgotten)  # what is closed now is not the program's fault
        for task in world.tasks:
            with suppress(BaseException):
                task.coroutine.close()
    results = [task.result for task in tasks]
    return Run(world, job, results, stopped, printed, forgotten)


def _program(code: CodeType, puzzle: Puzzle, show: Callable[..., None]) -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "program", "print": show}
    exec(code, names)
    program: Callable[..., Any] | None = names.get("program")
    if program is None:
        raise Fault(f"there is no function called program; begin with `{puzzle.signature}`")
    if not inspect.iscoroutinefunction(program):
        raise Fault(f"program is not asynchronous; begin with `{puzzle.signature}`")
    num_given = puzzle.signature.count(",") + 1
    try:
        inspect.signature(program).bind(*range(num_given))
    except TypeError:
        raise Fault(
            f"program takes other arguments than it is given; begin with `{puzzle.signature}`"
        ) from None
    return program


def _printer(rank: int, printed: list[str]) -> Callable[..., None]:
    def show(*values: object, sep: str = " ", end: str = "", **_: object) -> None:
        if len(printed) < MOST_PRINTED:
            printed.append(f"rank {rank}, line {line_of_program()}: {sep.join(map(str, values))}{end}")

    show.__doc__ = builtins.print.__doc__
    return show


@contextmanager
def limited_lines() -> Iterator[None]:
    """Count the lines that the learner's program runs, and raise EndlessLoop in it where they are too many."""
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != PROGRAM:
            return None
        if event == "line":
            num_lines += 1
            if num_lines > MOST_LINES:
                raise EndlessLoop(f"still running after {MOST_LINES:,} lines: an endless loop?")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
