"""Programs on pages: Python between fences, and diffs of it that are applied before it is run."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import NamedTuple

FENCE = re.compile(r"^ *(`{3,4})(\w*)\n(.*?)^ *\1$", re.M | re.S)
# **minipar: 9 lines, on FSDP's program**, or the same in <summary>; then its diff.
LABEL = re.compile(
    r"(?:\*\*|<summary>)([\w ,]+): (\d+) lines?(?:, on (?:(.+?)'s program|this))?(?:\*\*|</summary>)"
    r"\n\n```diff\n(.*?)^```$",
    re.M | re.S,
)


class Changes(NamedTuple):
    """A diff of a page.

    section  the heading that it is under
    who      whose program it makes, "minipar" or "torch", say
    told     the number of new lines, as the page has it
    on       the section whose program it changes; "": the program of its own section, None: that of the page
    """

    section: str
    who: str
    told: int
    on: str | None
    diff: str

    @property
    def num_lines(self) -> int:
        return sum(line[:1] == "+" and bool(line[1:].strip()) for line in self.diff.splitlines())


def changes_of(text: str) -> list[Changes]:
    """Return the diffs of a page in their order."""
    found = []
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        for label in LABEL.finditer(section):
            who, told, on, diff = label.groups()
            on = "" if on is None and ", on this" in label[0].partition("\n")[0] else on
            found.append(Changes(heading, who, int(told), on, diff))
    return found


def applied(diff: str, program: str) -> str:
    """Return the program after the diff, each of whose hunks, divided by @@, must fit in exactly one place."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +"))
        places = [found.start() for found in re.finditer(f"^{re.escape(old)}", program, re.M)]
        assert len(places) == 1, f"{len(places)} places for\n{old}"
        program = program[: places[0]] + new + program[places[0] + len(old) :]
    return program


def printed(source: str) -> str:
    """Return what a program prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(source, "<page>", "exec"), {"__name__": "page"})
    return out.getvalue()
