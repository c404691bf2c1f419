"""Where the names of other frameworks in docs/names.md were seen. As a program, it looks again:

`python -m tests.names_seen DeepSpeed FOLDER` lists the names that do not stand at their lines of the source in FOLDER.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """A name, and where it stands: `text` is what the line has of it."""

    name: str
    file: str
    line: int
    text: str


def load(toml: str) -> dict[str, list[Seen]]:
    """Return the names of each framework. Raises TypeError if a row lacks a field or has one too many."""
    frameworks = tomllib.loads(toml)
    return {
        framework: [Seen(**{"text": row.get("name"), **row}) for row in table["seen"]]
        for framework, table in frameworks.items()
    }


def not_there(seen: list[Seen], folder: Path) -> list[Seen]:
    """Return what does not stand at its line, as a whole word, in the files below `folder`."""
    return [row for row in seen if not stands(row.text, line_of(folder / row.file, row.line))]


def line_of(file: Path, number: int) -> str:
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    return lines[number - 1] if number <= len(lines) else ""


def stands(text: str, line: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(text)}(?![\w-])", line) is not None


if __name__ == "__main__":
    framework, folder = sys.argv[1:]
    for row in not_there(load(Path(__file__).with_suffix(".toml").read_text())[framework], Path(folder)):
        print(f"{row.name}: no {row.text} in {row.file}, line {row.line}")
