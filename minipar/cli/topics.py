"""`--help TOPIC`: help on a group of settings, on the model, or on all choices of a `Kind` with their options."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from minipar.cli.choices import Kinds, as_flag, option_fields
from minipar.cli.flags import HEADINGS, flags_of, settings_of
from minipar.config.choices import CHOSEN
from minipar.support.errors import one_of
from minipar.support.registry import Kind


def asked_topic(argv: Sequence[str]) -> str | None:
    """Return the word after --help, "" if there is none, "all" for --help-all; None if no help is asked for."""
    for word, following in zip(argv, [*argv[1:], "-"]):
        if word == "--help-all":
            return "all"
        if word in ("-h", "--help"):
            return "" if following.startswith("-") else following
    return None


def run_flags(argv: Sequence[str] | None, config: Any, command: str) -> tuple[Any, Sequence[str], str]:
    """Return the settings of a run as flags, the arguments for tyro, and the text below its help.

    If help on a `Kind` is asked for, prints it and exits. `argv` None: all flags, for shell completion.
    """
    topic = None if argv is None else asked_topic(argv)
    if topic is None:
        return flags_of(config, {} if argv is None else settings_of(argv), argv), argv or (), ""
    groups = [name for name in HEADINGS if name != "mixture"]
    helps = {f.name: f.metadata["help"] for f in dataclasses.fields(config) if f.name in CHOSEN}
    show_kind(topic, CHOSEN, helps)
    if topic not in ("", "all", *groups):
        refuse_topic(topic, CHOSEN, groups)

    def shown(group: str, f: dataclasses.Field[Any]) -> bool:
        if topic in ("", "all"):
            return topic == "all" or f.metadata.get("common", False)
        return topic in (group, "model" if group == "mixture" else group)

    if topic == "all":
        below = "\n".join(kind_text(name, CHOSEN[name], helps[name]) for name in CHOSEN)
    else:
        below = topics_text(command, groups, CHOSEN, "; " + f"minipar {command} --help-all shows everything")
    return flags_of(config, settings_of(argv or ()), shown=shown), ["--help"], below


def show_kind(topic: str, kinds: Kinds, helps: dict[str, str]) -> None:
    """Print the help of the `Kind` that the topic names, and exit; do nothing if it names none."""
    for name in kinds:
        if topic in (name, _topic_of(name)):
            print(kind_text(name, kinds[name], helps[name]))
            raise SystemExit(0)


def refuse_topic(topic: str, kinds: Kinds, groups: Sequence[str] = ()) -> NoReturn:
    """Raise ValueError for a topic that does not exist."""
    topics = (*groups, *map(_topic_of, kinds))
    raise ValueError(f"--help {topic}: no such topic; use {one_of(topics, near=topic)}")


def topics_text(command: str, groups: Sequence[str], kinds: Kinds, more: str = "") -> str:
    """Return the text that lists the topics."""
    topics = ", ".join((*groups, *map(_topic_of, kinds)))
    text = f"minipar {command} --help TOPIC shows more: {topics}{more}."
    return _wrapped(text, 0)


def kind_text(name: str, kind: Kind[Any], help: str) -> str:
    """Describe every choice of a `Kind`: its help, its package if it is an extra, and its options as flags."""
    flag, packages = as_flag(name), kind.extras()
    lines = [_wrapped(f"{flag} NAME: {help}. NAME is one of:", 0), ""]
    for choice_name in kind:
        try:
            choice = kind[choice_name]
        except ValueError as error:
            lines.append(_row(choice_name, str(error), 2))
            continue
        brought = f"(package {packages[choice_name]})" if choice_name in packages else ""
        lines.append(_row(choice_name, f"{choice.help} {brought}".strip(), 2))
        for option, (f, hint) in ({} if choice.options is None else option_fields(choice.options)).items():
            text = f"{f.metadata.get('help', '')} (default: {f.default})"
            lines.append(_row(f"{as_flag(f'{name}.{option}')} {_type_text(hint)}".rstrip(), text, 6))
    return "\n".join(lines) + "\n"


def _topic_of(kind: str) -> str:
    return kind.replace("_", "-")


def _row(left: str, text: str, indent: int) -> str:
    column = 18 if indent == 2 else 40
    first = f"{'':{indent}}{left}".ljust(column - 1) + " "
    return _wrapped(text, column, first)


def _wrapped(text: str, indent: int, first: str = "") -> str:
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    wrapped = textwrap.wrap(
        text, max(width, indent + 30), initial_indent=first, subsequent_indent=" " * indent
    )
    return "\n".join(wrapped) or first.rstrip()


def _type_text(hint: Any) -> str:
    """Return the placeholder that help shows after a flag of this type: INT, {step,microbatch}; "" for a switch."""
    if get_origin(hint) in (Union, types.UnionType):
        return "|".join(_type_text(kind) for kind in get_args(hint) if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    names = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: ""}
    return names.get(hint, getattr(hint, "__name__", str(hint)).upper())
