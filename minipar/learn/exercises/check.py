"""Checks of a learner's file against its exercise's specification, stage by stage, up to the first stage that fails.

The file runs only in the ranks' own processes, under a deadline: what it prints, breaks, changes or leaves running stays
there, and the processes are ended after each check. This is not a sandbox: the file runs with all its owner's rights.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from minipar.learn.exercises.examine import at_line, find_fault
from minipar.learn.exercises.folder import file_of, remember
from minipar.learn.exercises.registry import Exercise, find_exercise
from minipar.runtime.launch import shutdown
from minipar.spec.all_specifications import check as check_specification
from minipar.spec.from_file import FromFile, Hangs, deadline
from minipar.spec.specification import STAGES

LIMIT_S = 120.0  # wall-clock time of a whole check
# One run on a rank may take a fifteenth of LIMIT_S; after that, the line that it has reached is reported.
RUNS = 15
MOST_LINES = 20  # show at most this many lines of the learner's output, and of a finding
MOST_CHARACTERS = 200  # show at most this many characters of a line
MOST_OF_A_SENTENCE = 5 * MOST_CHARACTERS
WORDS = {"file": "the file", **STAGES}


@dataclass(frozen=True)
class Result:
    """The result of a check.

    state    "green": every stage passed; "todo": the run reached a hole; "red": `stage` failed, and `words` says why
    met      the stages passed, in order
    """

    name: str
    state: Literal["todo", "red", "green"]
    met: tuple[str, ...] = ()
    stage: str | None = None
    words: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.state == "todo":
            return f"{self.name}: TODO  {self.words}"
        if self.state == "green":
            return (
                f"{self.name}: GREEN  {', '.join(STAGES[stage] for stage in self.met)} ({self.seconds:.1f} s)"
            )
        met = f"; passed: {', '.join(STAGES[stage] for stage in self.met)}" if self.met else ""
        return f"{self.name}: RED  {WORDS[self.stage or 'file']}: {self.words}{met}"


def check(name: str, folder: str | Path = "exercises", limit_s: float = LIMIT_S) -> Result:
    """Check the exercise's file in the folder (or the file `folder`), and store the result in the file's folder.

    Raises ValueError for an unknown exercise or a file that does not exist.
    """
    exercise = find_exercise(name)
    path = file_of(exercise, folder)
    source = FromFile(str(path.resolve()), tuple(exercise.solution), limit_s=limit_s / RUNS)
    start_s = time.perf_counter()
    with printing_little():
        try:
            with deadline(None, limit_s):
                words = find_fault(source, exercise)
                result = (
                    _met_stages(exercise, source) if words is None else Result(name, "red", (), "file", words)
                )
        except Hangs:
            words = f"it did not come to an end within {limit_s:g} s, and was ended ({at_line(path, _entry(exercise))})"
            result = Result(name, "red", (), "runs", words)
        finally:
            shutdown()
    result = with_line(replace(result, name=exercise.name), path, exercise)
    remember(exercise, path, state=result.state)
    return replace(result, seconds=time.perf_counter() - start_s)


def _met_stages(exercise: Exercise, source: FromFile) -> Result:
    report = check_specification(exercise.specification, source)
    met = tuple(verdict.stage for verdict in report.verdicts if verdict.words is None)
    if report.first_wrong is None:
        return Result(exercise.name, "green", met)
    return Result(exercise.name, "red", met, *report.first_wrong[:2])


def with_line(result: Result, path: Path, exercise: Exercise) -> Result:
    """Turn a failure at a hole into "todo"; if the explanation names no line of the file, add the definition's line.

    Of several definitions it is the one that the explanation names.
    """
    words = result.words
    if words is None:
        return result
    if hole := re.search(rf"raised NotImplementedError.*?({re.escape(path.name)}, line \d+)", words):
        return replace(result, state="todo", words=f"{hole[1]}: still to be written")
    if not re.search(rf"{re.escape(path.name)}(, line |:)\d+", words):
        named = [name for name in exercise.solution if re.search(rf"\b{re.escape(name)}\b", words)]
        words = f"{words} ({at_line(path, named[0] if named else _entry(exercise))})"
    words = re.sub(r"; (?=rank \d+ waits to )", "\n", words)  # of a deadlock, a line for each rank
    lines = [part for line in words.split("\n") for part in _wrapped(line)]
    return replace(result, words="\n".join(lines[:MOST_LINES]))


def _wrapped(line: str) -> list[str]:
    """Split a line of a report into lines of at most MOST_CHARACTERS.

    A text longer than any sentence of this package comes from the learner's code, and its middle is left out.
    """
    if len(line) > MOST_OF_A_SENTENCE:
        line = f"{line[: MOST_OF_A_SENTENCE // 2]} ... {line[-MOST_OF_A_SENTENCE // 2 :]}"
    return textwrap.wrap(line, MOST_CHARACTERS, replace_whitespace=False) or [""]


def _entry(exercise: Exercise) -> str:
    return next(iter(exercise.solution))


@contextlib.contextmanager
def printing_little() -> Iterator[None]:
    """Make a context that shows the first lines that ranks print, and counts all other lines."""
    out = _FirstLines(sys.stdout)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield
    if out.left < 0:
        print(f"... and {-out.left} more lines")


class _FirstLines(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self.stream, self.left, self.column = stream, MOST_LINES, 0

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n", max(0, self.left))
        for line in lines:
            self._write(line)
            self.stream.write("\n")
            self.column = 0
        self.left -= len(lines)
        if self.left > 0:
            self._write(rest)
        else:
            self.left -= rest.count("\n")
        return len(text)

    def _write(self, text: str) -> None:
        """Write as much as the current line still has room for."""
        self.stream.write(text[: max(0, MOST_CHARACTERS - self.column)])
        self.column += len(text)

    def flush(self) -> None:
        self.stream.flush()
