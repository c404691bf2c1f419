"""Convert a configuration to flags: dataclasses for tyro, one per group of options, without checks; and back."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
from pathlib import Path
from typing import Annotated, get_type_hints

import tyro

HEADINGS = {
    "mesh": "Who computes what. Any mesh gives the same losses.",
    "messages": "Cheap messages: gradients compressed, or sent more rarely.",
    "memory": "What is kept, and where.",
    "optimization": "The batch and the optimizer.",
    "precision": "Numbers, and what is none.",
    "data": "The text, and what is drawn at random.",
    "mixture": "Experts, in short.",
    "run": "What a run writes, keeps and compares.",
    "model": "The model: its numbers depend on these and on the seed, never on the mesh.",
}


def settings_of(argv: list[str]) -> dict:
    """Return the settings in the file given by `--config`: the defaults of the other flags."""
    from minipar.train.toml_config import read_settings

    for i, word in enumerate(argv):
        if word.startswith("--config="):
            return read_settings(Path(word.partition("=")[2]))
        if word == "--config" and i + 1 < len(argv):
            return read_settings(Path(argv[i + 1]))
    return {}


def flags_of(config, settings: dict):
    """Return the options as a tree of dataclasses, one per heading of `--help`; `settings` override `config`."""
    given = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    # A field whose None was replaced by a value derived from other fields is None again: flags may change those fields.
    for f in dataclasses.fields(config):
        if f.default is None and dataclasses.replace(config, **{f.name: None}) == config:
            values[f.name] = None
    values |= given
    hints = get_type_hints(type(config))
    groups: dict[str, list[dataclasses.Field]] = {}
    members = []
    for f in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[f.name]):
            nested = flags_of(values[f.name], settings.get(f.name, {}))
            members.append((f.name, type(nested), nested))
        else:
            groups.setdefault(f.metadata.get("group", ""), []).append(f)
    groups_as_flags = {name: _flags_of_group(name, inside, hints, values) for name, inside in groups.items()}
    if list(groups_as_flags) == [""] and not members:
        return groups_as_flags[""]
    for name, flags in groups_as_flags.items():
        members.append((name, tyro.conf.OmitArgPrefixes[type(flags)], flags))
    return _make_instance(type(config).__name__, members, "")


def _flags_of_group(name: str, inside: list[dataclasses.Field], hints: dict, values: dict):
    members = [
        (f.name, Annotated[hints[f.name], tyro.conf.arg(help=f.metadata.get("help"))], values[f.name])
        for f in inside
    ]
    return _make_instance(name.capitalize() or "Model", members, HEADINGS.get(name or "model", ""))


def _make_instance(name: str, members: list, doc: str):
    """Make a frozen dataclass with these (name, type, value) fields, and return its instance."""
    named = [(n, hint, dataclasses.field(default=value)) for n, hint, value in members]
    groups_as_flags = dataclasses.make_dataclass(name, named, frozen=True)
    groups_as_flags.__doc__ = doc
    return groups_as_flags()


def config_of(flags, cls):
    """Return the configuration that these flags describe. Raises ValueError where it is invalid."""
    return cls(**_values(flags, get_type_hints(cls)))


def _values(flags, hints: dict) -> dict:
    values = {}
    for f in dataclasses.fields(flags):
        value = getattr(flags, f.name)
        if f.name in hints and dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = config_of(value, hints[f.name])
        elif dataclasses.is_dataclass(value):
            values |= _values(value, hints)
        else:
            values[f.name] = value
    return values


# The command line --------------------------------------------------------------------------------------------


def parse_command(argv: list[str], commands: dict, description: str):
    """Return the callable that runs the command. Raises ValueError of one line, where tyro would print a box."""
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, 1)
        meant = f"; did you mean {near[0]}?" if near else f"; use {', '.join(commands)}"
        raise ValueError(f"{argv[0]!r} is no command{meant}")
    _require_values(argv)
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.extras.subcommand_cli_from_dict(
                commands, prog="minipar", description=description, args=argv
            )
    except SystemExit as end:
        if end.code != 2:
            raise
        raise ValueError(_one_line(stderr.getvalue(), argv)) from None


def _require_values(argv: list[str]) -> None:
    """Raise ValueError for an empty argument, which would be read as the current folder where a path is wanted."""
    for before, word in zip(["", *argv], argv):
        flag = word.removesuffix("=") if word.startswith("--") and word.endswith("=") else before
        if (not word or flag != before) and flag != "--prompt":
            raise ValueError(f"{flag or 'the first argument'} is empty; give a value, or leave it out")


def _one_line(box: str, argv: list[str]) -> str:
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
    if wrong := re.match(r"invalid choice '(.*?)' .* Expected one of \((.*)\)", first):
        near = difflib.get_close_matches(wrong[1], re.findall(r"'(.*?)'", wrong[2]), 1)
        first += f"; did you mean {near[0]}?" if near else ""
    command = f" {argv[0]}" if argv and not argv[0].startswith("-") else ""
    return f"{first}; see minipar{command} --help"
