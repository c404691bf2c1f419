"""A learner's file held to its exercise's specification, stage by stage, up to the first that is not met.

The file runs in the ranks' own processes alone, under a deadline: what it prints, breaks, changes or keeps running stays
there, and the processes are ended after each check. It is contained, not locked in: it may do what its owner may.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from minipar.exercises.examine import at_line, find_fault
from minipar.exercises.folder import file_of, remember
from minipar.exercises.registry import Exercise, find_exercise
from minipar.runtime.launch import shutdown
from minipar.spec.all_specifications import SPECIFICATIONS
from minipar.spec.from_file import FromFile, Hangs, deadline

MOST_RANKS = 4
LIMIT_S = 120.0  # of a whole check, by the clock
RUNS = 15  # a run of it on a rank may compute for a fifteenth of that; then its line is named
MOST_LINES = 20  # of what the learner's code prints
STAGES = {
    "file": "the file",
    "runs": "it runs",
    "small": "right on one small case",
    "drawn": "right on drawn cases",
    "bytes": "the bytes sent",
    "memory": "the memory",
    "order": "the order of events",
    "refusals": "what it refuses",
}


@dataclass(frozen=True)
class Result:
    """The findings of a check.

    state    "green": every stage is met; "todo": it came to a hole; "red": `stage` is not met, and `words` say how
    met      the stages met, in order
    """

    name: str
    state: Literal["todo", "red", "green"]
    met: tuple[str, ...] = ()
    stage: str | None = None
    words: str | None = None
    seconds: float = 0.0

    def __str__(self):
        if self.state == "todo":
            return f"{self.name}: TODO  {self.words}"
        if self.state == "green":
            return f"{self.name}: GREEN  {', '.join(map(STAGES.get, self.met))} ({self.seconds:.1f} s)"
        met = f"; met before: {', '.join(map(STAGES.get, self.met))}" if self.met else ""
        return f"{self.name}: RED  {STAGES[self.stage]}: {self.words}{met}"


def check(name: str, folder: str | Path = "exercises", limit_s: float = LIMIT_S) -> Result:
    """Check the exercise's file in the folder (or the file `folder`), and remember the result beside it.

    Raises ValueError for an unknown exercise or a file that does not exist.
    """
    exercise = find_exercise(name)
    path = file_of(exercise, folder)
    source = FromFile(str(path.resolve()), tuple(exercise.solution), limit_s=limit_s / RUNS)
    start_s = time.perf_counter()
    with printing_little():
        try:
            with deadline(None, limit_s):
                words = find_fault(source, exercise, MOST_RANKS)
                result = (
                    _met_stages(exercise, source) if words is None else Result(name, "red", (), "file", words)
                )
        except Hangs:
            words = f"it did not come to an end within {limit_s:g} s, and was ended ({at_line(path, _entry(exercise))})"
            result = Result(name, "red", (), "runs", words)
        finally:
            shutdown()
    result = _with_line(replace(result, name=exercise.name), path, _entry(exercise))
    remember(exercise, path, state=result.state)
    return replace(result, seconds=time.perf_counter() - start_s)


def _met_stages(exercise: Exercise, source: FromFile) -> Result:
    met: list[str] = []
    for stage in SPECIFICATIONS[exercise.specification].stages:
        words = stage.test(source)
        if words is not None:
            return Result(exercise.name, "red", tuple(met), stage.name, words)
        met.append(stage.name)
    return Result(exercise.name, "green", tuple(met))


def _with_line(result: Result, path: Path, entry: str) -> Result:
    """Turn a red at a hole into a TODO; add the line of the definition to words that name none of the file."""
    words = result.words
    if words is None:
        return result
    if hole := re.search(rf"raised NotImplementedError.*?({re.escape(path.name)}, line \d+)", words):
        return replace(result, state="todo", words=f"{hole[1]}: still to be written")
    if not re.search(rf"{re.escape(path.name)}(, line |:)\d+", words):
        words = f"{words} ({at_line(path, entry)})"
    return replace(result, words=words)


def _entry(exercise: Exercise) -> str:
    return next(iter(exercise.solution))


@contextlib.contextmanager
def printing_little():
    """Let the first lines through that ranks print, and count the others."""
    out = _FirstLines(sys.stdout)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield
    if out.left < 0:
        print(f"... and {-out.left} more lines")


class _FirstLines(io.TextIOBase):
    def __init__(self, stream):
        self.stream, self.left = stream, MOST_LINES

    def write(self, text: str) -> int:
        before, lines = self.left, text.splitlines(keepends=True)
        self.left -= text.count("\n")
        if before > 0:
            self.stream.write("".join(lines[: before + (not text.endswith("\n"))]))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
