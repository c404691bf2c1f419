"""The command `minipar puzzle`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Literal

import tyro

from minipar.learn.puzzles.puzzle import Puzzle
from minipar.learn.puzzles.registry import PUZZLES, find_puzzle
from minipar.learn.puzzles.verdicts import check

Action = Literal["list", "show", "start", "check", "hints", "answer"]
WIDTH = 120  # as the tasks are written
Work = Callable[[], None]


def puzzle_command(
    action: tyro.conf.Positional[Action],
    name: tyro.conf.Positional[str] = "",
    file: tyro.conf.Positional[Path | None] = None,
) -> Work:
    """Write the program of one rank; it runs on a simulated network, and the verdict is in words. The site has them too.

    Args:
        action: list all; show NAME, its task; start NAME writes its stub; check NAME; hints NAME; answer NAME.
        name: the puzzle, by name or number.
        file: the program; NAME.py if not given.
    """
    if action == "list":
        return _list
    puzzle = find_puzzle(name)
    path = file or Path(f"{puzzle.name}.py")
    actions: dict[str, Work] = {
        "show": partial(_show, puzzle),
        "start": partial(_start, puzzle, path),
        "check": partial(_check, puzzle, path),
        "hints": partial(print, "\n".join(f"{i}. {hint}" for i, hint in enumerate(puzzle.hints, 1))),
        "answer": partial(print, puzzle.answer),
    }
    return actions[action]


def _list() -> None:
    for number, puzzle in enumerate(PUZZLES.values(), 1):
        print(f"{number:2} {puzzle.name:15} {puzzle.minutes:3} min  lesson {puzzle.lesson}  {puzzle.title}")
    print("begin with `minipar puzzle start naive`")


def _show(puzzle: Puzzle) -> None:
    print(f"{puzzle.title}\n\n{puzzle.task.strip()}\n\n{fill(puzzle.conditions, WIDTH)}\n\n{puzzle.stub}")


def _start(puzzle: Puzzle, path: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(puzzle.stub)
    except FileExistsError:
        raise ValueError(f"{path} exists already; check it, or rename it to start afresh") from None
    except OSError as error:
        raise ValueError(f"file={path} cannot be written: {error.strerror}") from None
    print(f"{path}: {puzzle.title}; `minipar puzzle show {puzzle.name}` has the task")


def _check(puzzle: Puzzle, path: Path) -> None:
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"file={path} cannot be read: {error.strerror}") from None
    verdict = check(puzzle, source)
    for line in verdict.run.printed if verdict.run else ():
        print(line)
    print(verdict)
    names = list(PUZZLES)
    if verdict.is_right and puzzle.name != names[-1]:
        print(f"next: `minipar puzzle show {names[names.index(puzzle.name) + 1]}`")
    raise SystemExit(0 if verdict.is_right else 1)
