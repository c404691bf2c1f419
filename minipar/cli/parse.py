"""Parsing a command line with tyro; a mistake gives a one-line message instead of tyro's box."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tyro

Work = Callable[[], None]  # does a command's work, once its arguments are known


class Parsed(NamedTuple):
    """The input of tyro: a function whose parameters are the flags, the words of a command line, and text for the help."""

    function: Callable[..., Any]
    argv: Sequence[str]
    below_help: str = ""


def parse_command(name: str, parsed: Parsed) -> Work:
    """Return the callable that does the command's work. Raises a one-line ValueError for a mistake."""
    function, argv, below_help = parsed
    _require_values(argv)
    try:
        return _in_one_line(
            lambda: tyro.cli(function, prog=f"minipar {name}", args=argv), f"minipar {name} --help"
        )
    except SystemExit:
        if below_help:
            print(below_help)
        raise


def parse_commands(argv: Sequence[str], commands: Mapping[str, Callable[..., Any]], description: str) -> Work:
    """Return the callable of the command that `argv` names. Raises a one-line ValueError for a mistake."""
    return _in_one_line(
        lambda: tyro.extras.subcommand_cli_from_dict(
            dict(commands), prog="minipar", description=description, args=argv
        ),
        "minipar --help",
    )


def _in_one_line(parse: Callable[[], Any], see: str) -> Work:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            work: Work = parse()
            return work
    except SystemExit as end:
        if end.code != 2:
            raise
        raise ValueError(_one_line(stderr.getvalue(), see)) from None


def _require_values(argv: Sequence[str]) -> None:
    """Raise ValueError for an empty argument, which as a path would mean the current folder."""
    for before, word in zip(["", *argv], argv):
        flag = word.removesuffix("=") if word.startswith("--") and word.endswith("=") else before
        if (not word or flag != before) and flag != "--prompt":
            raise ValueError(f"{flag or 'the first argument'} is empty; give a value, or leave it out")


def _one_line(box: str, see: str) -> str:
    """Reduce tyro's boxed error to one line: its first paragraph, and the flag tyro suggests."""
    is_boxed = "╭" in box  # the box holds the title; otherwise the title is the first paragraph
    lines = [line.strip("│ ") for line in box.splitlines() if line and line[0] not in "╭╰"]
    paragraphs = [
        list(group)
        for ruled, group in itertools.groupby(lines, lambda line: not line.strip("─-"))
        if not ruled
    ]
    first = " ".join(paragraphs[0 if is_boxed else 1]).rstrip(".")
    suggested = next((line for line in lines if line.startswith("--") and line.strip("-")), None)
    if first.startswith("Unrecognized") and suggested:
        first += f"; did you mean {suggested.split()[0].rstrip(',')}?"
    # Most servers' port is --port.
    if "serve" in see and (port := re.match(r"Unrecognized options: --port\b[=, ]*(\d*)", first)):
        first += f"; did you mean {f'--http {port[1]}'.rstrip()}?"
    if wrong := re.match(r"invalid choice '(.*?)' .* Expected one of \((.*)\)", first):
        near = difflib.get_close_matches(wrong[1], re.findall(r"'(.*?)'", wrong[2]), 1)
        first += f"; did you mean {near[0]}?" if near else ""
    return f"{first}; see {see}"
