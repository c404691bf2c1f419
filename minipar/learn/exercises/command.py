"""The command `minipar exercise`. Imports torch only for actions that check something."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

import contextlib
import json as json_format
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minipar.learn.exercises.cards import ask, draw_cards, printed
from minipar.learn.exercises.folder import file_of, next_hint, start, state_of
from minipar.learn.exercises.registry import EXERCISES, Exercise, find_exercise
from minipar.learn.exercises.solution import solution_text

ACTIONS = ("list", "start", "check", "hint", "solution", "cards", "project")
Action = Literal["list", "start", "check", "hint", "solution", "cards", "project"]
Draw = Callable[[Exercise, Path], str | None]
Work = Callable[[], None]
LOOK_S = 0.3  # how often --watch looks at the file


def exercise_command(draw: Draw) -> Callable[..., Work]:
    """Return the command. `draw(exercise, file)` draws a run of the learner's code, and returns a line that says where."""

    def command(
        action: tyro.conf.Positional[Action],
        name: tyro.conf.Positional[str] = "",
        folder: tyro.conf.Positional[Path] = Path("exercises"),
        json: bool = False,
        watch: bool = False,
        draw_run: Annotated[bool, tyro.conf.arg(name="draw")] = True,
        seed: int | None = None,
    ) -> Work:
        """Write a function yourself, and have it checked on real ranks; a sentence says what is wrong.

        Args:
            action: list all; start NAME writes its file; check NAME; hint NAME gives the next of three; solution NAME;
                cards asks ten problems for pen and paper, cards 06 those of lesson 06; project FOLDER, your own framework
                in ten steps.
            name: the exercise; for list and project, the folder; for cards, a lesson.
            folder: where the files are; for check, it may also be a file.
            json: print the result as JSON (list, check, cards).
            watch: check again whenever the file is saved, until Ctrl-C.
            draw_run: after a check that passes, draw the run.
            seed: seed of the numbers on the cards; new numbers each time if not given.
        """
        actions = {
            "list": partial(_list, Path(name) if name else folder, json),
            "start": partial(_start, name, folder),
            "check": partial(_check, name, folder, json, watch, draw if draw_run else None),
            "hint": partial(_hint, name, folder),
            "solution": partial(_solution, name),
            "cards": partial(_cards, name, seed, json),
            "project": partial(_project, name),
        }
        return actions[action]

    return command


def _list(folder: Path, json: bool) -> None:
    rows = [
        {"name": e.name, "minutes": e.minutes, "needs": list(e.needs), "state": state_of(e, folder)}
        for e in EXERCISES
    ]
    if json:
        print(json_format.dumps(rows, indent=1))
        return
    print(f"{'':2} {'name':20} {'state':8} {'min':>3}  {'lesson':6}  what, and what it builds on")
    for number, (row, exercise) in enumerate(zip(rows, EXERCISES), 1):
        needs = f"  (best after {', '.join(exercise.needs)})" if exercise.needs else ""
        columns = f"{exercise.name:20} {row['state']:8} {exercise.minutes:3}  {exercise.lesson:6}"
        print(f"{number:2} {columns}  {exercise.title}{needs}")
    done = sum(row["state"] == "green" for row in rows)
    print(f"{done} of {len(rows)} green; begin with `minipar exercise start {_first_open(rows)}`")
    print("First steps, on a simulated network and without torch: `minipar puzzle list`")


def _first_open(rows: list[dict[str, Any]]) -> str:
    first: str = next((row["name"] for row in rows if row["state"] != "green"), rows[0]["name"])
    return first


def _start(name: str, folder: Path) -> None:
    exercise = find_exercise(name)
    path = start(exercise, folder)
    elsewhere = "" if folder == Path("exercises") else f" {folder}"
    print(f"{path}: {exercise.title}, about {exercise.minutes} minutes; lesson {exercise.lesson} explains it")
    print(
        f"then `minipar exercise check {exercise.name}{elsewhere}`, with --watch after every save; plain `pytest` too"
    )


def _hint(name: str, folder: Path) -> None:
    exercise = find_exercise(name)
    number, hint = next_hint(exercise, folder)
    print(f"{number} of {len(exercise.hints)}: {hint}")
    if number == len(exercise.hints):
        print(f"that is the last; `minipar exercise solution {exercise.name}` shows how it is done")


def _solution(name: str) -> None:
    print(solution_text(find_exercise(name)))


def _cards(lesson: str, seed: int | None, json: bool) -> None:
    cards = draw_cards(seed, lesson)
    if json:
        print(json_format.dumps([card._asdict() for card in cards], indent=1))
    elif not sys.stdin.isatty():
        print(printed(cards))
    else:
        print("Type a number, or nothing to see the answer.")
        with contextlib.suppress(EOFError):
            print(f"\n{ask(cards, input, print)} of {len(cards)} right")


def _project(name: str) -> None:
    from minipar.learn.exercises.project import check_project, start

    if not name:
        raise ValueError("folder is missing; `minipar exercise project my_framework` writes ten files there")
    folder = Path(name)
    start(folder)
    raise SystemExit(0 if check_project(folder, partial(print, flush=True)) else 1)


def _check(name: str, folder: Path, json: bool, watch: bool, draw: Draw | None) -> None:
    exercise = find_exercise(name)
    path = file_of(exercise, folder)
    green = _check_once(exercise, path, json, draw)
    while watch:
        before = _saved(path)
        while _saved(path) in (before, None):  # None: an editor replaces the file
            time.sleep(LOOK_S)
        print()
        _check_once(exercise, path, json, draw)
    raise SystemExit(0 if green else 1)


def _saved(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return None


def _check_once(exercise: Exercise, path: Path, json: bool, draw: Draw | None) -> bool:
    from minipar.learn.exercises.check import check

    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        result = check(exercise.name, path)
        drawn = draw(exercise, path) if result.state == "green" and draw and not json else None
    print(json_format.dumps(asdict(result)) if json else result, flush=True)
    if drawn:
        print(drawn)
    return result.state == "green"
