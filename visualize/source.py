"""Source code for notebooks: highlighted, with a link to its file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import minipar

if TYPE_CHECKING:
    from IPython.display import Markdown

ROOT = Path(minipar.__file__).resolve().parent.parent


def source(*objects: Callable[..., Any]) -> Markdown:
    """Return the source of functions and classes as a Markdown object for IPython, each after a link to its lines.

    Raises TypeError where Python knows no source for an object, such as a builtin.
    """
    from IPython.display import Markdown

    return Markdown("\n\n".join(map(source_text, objects)))  # type: ignore[no-untyped-call]


def source_text(thing: Callable[..., Any]) -> str:
    """Return the source of one function or class as Markdown text, after a link to its lines."""
    thing = inspect.unwrap(thing)  # otherwise the file would be the decorator's
    lines, first = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    where = ""
    if path.is_relative_to(ROOT):
        name = path.relative_to(ROOT).as_posix()
        where = f"[`{name}`](../{name}), from line {first}:\n\n"
    return f"{where}```python\n{dedent(''.join(lines)).rstrip()}\n```"
