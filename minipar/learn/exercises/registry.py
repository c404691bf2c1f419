"""All exercises, in the order in which they build on each other, read from `exercises.toml`. Imports no torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """A function or class to write; exercises.toml says what each field is."""

    name: str
    title: str
    minutes: int
    lesson: str
    needs: tuple[str, ...]
    specification: str
    solution: dict[str, str]
    hints: tuple[str, str, str]


def _exercise(row: dict[str, Any]) -> Exercise:
    needs, hints = tuple(row.pop("needs", ())), tuple(row.pop("hints"))
    specification = row.pop("specification", row["name"])
    return Exercise(needs=needs, hints=hints, specification=specification, **row)


EXERCISES = tuple(
    _exercise(row)
    for row in tomllib.loads((files(__package__) / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
)


@dataclass(frozen=True)
class Step:
    """A step of the project; project.toml says what each field is."""

    title: str
    minutes: int
    file: str
    pieces: list[str]
    checks: dict[str, str]
    meshes: list[str]
    hints: list[str]


STEPS = tuple(
    Step(**row)
    for row in tomllib.loads((files(__package__) / "project.toml").read_text(encoding="utf-8"))["step"]
)


def find_exercise(name: str) -> Exercise:
    """Return the exercise of this name. Raises ValueError, with the most similar name, if there is none."""
    by_name = {exercise.name: exercise for exercise in EXERCISES}
    plain = name.replace("-", "_").removesuffix(".py")
    if plain not in by_name:
        if plain in {step.file for step in STEPS}:
            raise ValueError(
                f"name={name!r} is a step of a project; `minipar exercise project FOLDER` checks it"
            )
        near = get_close_matches(plain, by_name, 1)
        meant = f"did you mean {near[0]}?" if near else "`minipar exercise list` names them all"
        raise ValueError(f"name={name!r} is no exercise; {meant}")
    return by_name[plain]
