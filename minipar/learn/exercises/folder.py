"""The learner's folder: starts an exercise, stores the result of its last check, and gives its hints one at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from minipar.learn.exercises.registry import EXERCISES, Exercise

STUBS = Path(__file__).parent / "stubs"
PROGRESS, TESTS = "progress.json", "test_exercises.py"
HEAD = '"""Plain `pytest` in this folder checks every exercise that was started, and skips what is still to be written."""'
PYTEST_FILE = f"""{HEAD}

from pathlib import Path
from typing import Any

import pytest

from minipar.learn.exercises import check, started

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", started(FOLDER))
def test_exercise(name):
    result = check(name, FOLDER)
    if result.state == "todo":
        pytest.skip(str(result))
    assert result.state == "green", str(result)
"""


def file_of(exercise: Exercise, folder: str | Path) -> Path:
    """Return the learner's file: the file of the exercise's name in `folder`, or `folder` itself if that is a file.

    Raises ValueError if it does not exist.
    """
    folder = Path(folder)
    path = folder if folder.suffix == ".py" else folder / f"{exercise.name}.py"
    if not path.is_file():
        start = f"minipar exercise start {exercise.name}"
        start += "" if folder == Path("exercises") or folder.suffix == ".py" else f" {folder}"
        raise ValueError(f"{path} does not exist; `{start}` writes it")
    return path


def start(exercise: Exercise, folder: str | Path) -> Path:
    """Copy the exercise's stub, and a file for pytest, into the folder. Raises ValueError if the stub's file exists."""
    folder = Path(folder)
    path = folder / f"{exercise.name}.py"
    if folder.suffix == ".py" or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"folder={folder} is a file; give the folder in which to write {exercise.name}.py")
    if path.exists():
        raise ValueError(f"{path} exists already; check it, or rename it to start afresh")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text((STUBS / f"{exercise.name}.py").read_text())
        if not (folder / TESTS).exists():
            (folder / TESTS).write_text(PYTEST_FILE)
    except OSError as error:
        raise ValueError(f"folder={folder} cannot be written: {error.strerror}") from None
    return path


def started(folder: str | Path) -> list[str]:
    """Return the names of the exercises whose files are in the folder, in order."""
    return [exercise.name for exercise in EXERCISES if (Path(folder) / f"{exercise.name}.py").is_file()]


def state_of(exercise: Exercise, folder: str | Path) -> str:
    """Return "-" if the exercise is not started, "started" if it is not checked, else "todo", "red" or "green"."""
    if exercise.name not in started(folder):
        return "-"
    state: str = _progress(Path(folder)).get(exercise.name, {}).get("state", "started")
    return state


def remember(exercise: Exercise, path: Path, **what: object) -> None:
    """Store the exercise's state or the number of hints given. Do nothing if the folder is not writable."""
    progress = _progress(path.parent)
    progress.setdefault(exercise.name, {}).update(what)
    beside = path.parent / f".{PROGRESS}.{os.getpid()}"
    try:
        beside.write_text(json.dumps(progress, indent=1) + "\n")
        beside.replace(path.parent / PROGRESS)
    except OSError:
        beside.unlink(missing_ok=True)


def next_hint(exercise: Exercise, folder: str | Path) -> tuple[int, str]:
    """Return the number (1, 2, 3) and the text of the next hint; after the third hint, return it again."""
    path = file_of(exercise, folder)
    given = _progress(path.parent).get(exercise.name, {}).get("hints", 0)
    number = min(given + 1, len(exercise.hints))
    remember(exercise, path, hints=number)
    return number, exercise.hints[number - 1]


def _progress(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        progress = json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}
