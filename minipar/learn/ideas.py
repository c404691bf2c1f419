"""The map of ideas: `minipar ideas`, and the places that are made from ideas.toml.

python -m minipar.learn.ideas      in a checkout: writes the table of README and the head of each lesson anew
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from minipar.support.errors import one_of

BEGIN, END = "<!-- ideas: python -m minipar.learn.ideas -->", "<!-- end of ideas -->"


@dataclass(frozen=True)
class Idea:
    """A row of ideas.toml, which explains each field."""

    name: str
    title: str
    question: str
    floor: tuple[str, ...]
    spec: tuple[str, ...]
    library: tuple[str, ...]
    lessons: tuple[str, ...]
    exercises: tuple[str, ...]
    puzzles: tuple[str, ...]
    exhibits: tuple[str, ...]
    topics: tuple[str, ...]


@cache
def ideas() -> dict[str, Idea]:
    """Return the ideas by name, in the order in which one learns them."""
    rows = tomllib.loads((files("minipar") / "ideas.toml").read_text(encoding="utf-8"))["idea"]
    found = {}
    for row in rows:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
        found[row["name"]] = Idea(**fields)
    return found


def ideas_command(name: str | None = None, /) -> Callable[[], None]:
    """Show the twelve ideas, or where one of them is: its definition, specification, library, lesson, exercise.

    Args:
        name: an idea, such as zero3; all if not given.
    """
    if name is not None and name not in ideas():
        raise ValueError(f"idea={name!r} is unknown; use {one_of(ideas(), name)}")
    return lambda: print(overview() if name is None else place_of(ideas()[name]))


def overview() -> str:
    """Return all ideas as text, two lines each."""
    lines = [f"{i.name:11}{i.title}\n{'':11}{i.question}" for i in ideas().values()]
    return "\n".join([*lines, "", "`minipar ideas NAME` says where an idea is."])


def place_of(idea: Idea) -> str:
    """Return all that hangs on an idea as text, a line each."""
    rows = {
        "definition": [f"minipar/simple/{name}" for name in idea.floor] or ["formulas: minipar/cost/"],
        "specification": [f"minipar.spec.SPECIFICATIONS[{name!r}]" for name in idea.spec],
        "library": idea.library,
        "lesson": [f"lessons/{name}_*.ipynb" for name in idea.lessons],
        "exercise": [f"minipar exercise start {name}" for name in idea.exercises],
        "puzzle": [f"minipar puzzle start {name}" for name in idea.puzzles],
        "wrong code": [f"minipar museum {name}" for name in idea.exhibits],
        "questions": [f"minipar quiz {name.replace(' ', '-')}" for name in idea.topics],
    }
    lines = [f"{idea.title}: {idea.question}"]
    for what, places in rows.items():
        lines += [f"{what if n == 0 else '':15}{place}" for n, place in enumerate(places)]
    return "\n".join(lines)


# The places that are made from the table ---------------------------------------------------------------------------------


def readme_table(root: Path) -> str:
    """Return the ideas as a table with links, for README."""
    rows = ["| idea | question | read it | lesson |", "|---|---|---|---|"]
    for idea in ideas().values():
        floor = [f"[{name}](minipar/simple/{name})" for name in idea.floor] or ["[formulas](minipar/cost)"]
        lessons = [f"[{name}](lessons/{lesson_file(root, name).name})" for name in idea.lessons]
        rows.append(f"| **{idea.title}** | {idea.question} | {', '.join(floor)} | {', '.join(lessons)} |")
    return "\n".join(rows)


def lesson_head(number: str) -> str:
    """Return the line of links below a lesson's title; "" if no idea has this lesson."""
    own = [idea for idea in ideas().values() if number in idea.lessons]
    floor = [f"[`simple/{name}`](../minipar/simple/{name})" for idea in own for name in idea.floor]
    exercises = [f"`{name}`" for idea in own for name in idea.exercises]
    puzzles = [f"`{name}`" for idea in own for name in idea.puzzles]
    topics = [f"[{t}](interview/{t.replace(' ', '-')}.md)" for idea in own for t in idea.topics]
    rows = {"floor": floor, "exercises": exercises, "puzzles": puzzles, "questions": topics}
    kept = {what: list(dict.fromkeys(places)) for what, places in rows.items() if places}
    ends = " · ".join(f"{what} {', '.join(places)}" for what, places in kept.items())
    return f"**{' and '.join(idea.title for idea in own)}**: {ends}" if own else ""


def lesson_file(root: Path, number: str) -> Path:
    (found,) = (root / "lessons").glob(f"{number}_*.ipynb")
    return found


def with_table(text: str, table: str) -> str:
    """Return README's text with this table between the marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def with_head(first_cell: str, head: str) -> str:
    """Return the text of a lesson's first cell with this head as its third paragraph."""
    title, times, *rest = first_cell.split("\n\n")
    rest = [paragraph for n, paragraph in enumerate(rest) if n or not re.match(r"\*\*[^*]+\*\*: ", paragraph)]
    return "\n\n".join([title, times, *([head] if head else []), *rest])


def write(root: Path) -> None:
    """Write README's table and the heads of the lessons."""
    readme = root / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), readme_table(root)), encoding="utf-8")
    for path in sorted((root / "lessons").glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cell = notebook["cells"][0]
        text = with_head("".join(cell["source"]), lesson_head(path.name[:2]))
        cell["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path())
