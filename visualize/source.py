"""Source code as a notebook shows it: highlighted, with the file that it is from."""

from __future__ import annotations

import inspect
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parent.parent


def source(*objects):
    """Return the source of functions and classes as a Markdown object for IPython, each after a link to its lines.

    Raises TypeError where Python knows no source for one of them, as for a builtin.
    """
    from IPython.display import Markdown

    return Markdown("\n\n".join(map(source_text, objects)))


def source_text(thing) -> str:
    """Return the same as text."""
    lines, first = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing))
    where = ""
    if path.is_relative_to(ROOT):
        name = path.relative_to(ROOT).as_posix()
        where = f"[`{name}`](../{name}), from line {first}:\n\n"
    return f"{where}```python\n{dedent(''.join(lines)).rstrip()}\n```"
