"""Run a learner's source on every rank of a simulated world, and stop it if it does not end."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from minipar.learn.puzzles import collectives
from minipar.learn.puzzles.network import PROGRAM, Comm, Stopped, World, line_of_error
from minipar.learn.puzzles.puzzle import Job, Puzzle
from minipar.learn.puzzles.values import Fault

MOST_LINES = 100_000  # limit of executed lines of the learner's program, on all ranks together
MOST_PRINTED = 200


class EndlessLoop(BaseException):
    """The program ran more than MOST_LINES lines. Not an Exception, so the program's `except Exception` cannot catch it."""


@dataclass(frozen=True)
class Run:
    """The outcome of one run: each rank's result, or the error that stopped the run."""

    world: World
    job: Job
    results: list[Any]
    stopped: Stopped | None
    printed: list[str]
    forgotten: list[tuple[int, str, int | None]]  # calls without await: rank, name, line


def compiled(source: str) -> CodeType:
    """Compile a learner's source. Raises SyntaxError if it is invalid."""
    return compile(source, PROGRAM, "exec", dont_inherit=True)


def run(puzzle: Puzzle, code: CodeType, num_ranks: int) -> Run:
    """Run the program on this many ranks, each with its own globals. An error that it raises is in `Run.stopped`."""
    world = World(num_ranks, puzzle.network(num_ranks))
    job = puzzle.job(world)
    printed: list[str] = []
    tasks, stopped = [], None
    rank = 0
    with traced(world):
        try:
            for rank in range(num_ranks):
                comm = world.comms[rank]
                comm.collectives = collectives if puzzle.has_collectives else None
                program = _program(code, puzzle, _printer(comm, printed))
                # Pass the arguments without keeping a reference, so that those the program deletes are freed.
                tasks.append(world.start(program(comm, *job.inputs(rank)), rank))
            world.run()
        except Stopped as error:
            stopped = error
        except (Exception, EndlessLoop, SystemExit) as error:
            stopped = Stopped(rank, line_of_error(error), error)
        # Copied first: closing the tasks below adds calls that the program did not forget.
        forgotten = list(world.forgotten)
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


def _printer(comm: Comm, printed: list[str]) -> Callable[..., None]:
    def show(*values: object, sep: str = " ", end: str = "", **_: object) -> None:
        if len(printed) < MOST_PRINTED:
            printed.append(f"rank {comm.rank}, line {comm._world.line}: {sep.join(map(str, values))}{end}")

    show.__doc__ = builtins.print.__doc__
    return show


@contextmanager
def traced(world: World) -> Iterator[None]:
    """Return a context in which `world.line` is the running line of the learner's program.

    It raises EndlessLoop in the program once that has run more than MOST_LINES lines.
    """
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != PROGRAM:
            return None
        world.line = frame.f_lineno
        if event == "return":  # to another function of the program, or an await; what runs next is ours
            caller = frame.f_back
            world.line = caller.f_lineno if caller and caller.f_code.co_filename == PROGRAM else None
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
