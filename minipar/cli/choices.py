"""Choices by name on the command line. Only extras named there are imported, and only their options become flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import tyro

from minipar.support.errors import one_of
from minipar.support.registry import Kind

Kinds = Mapping[str, Kind[Any]]  # keyed by the Python name of the flag that chooses


def words_of(argv: Sequence[str], name: str) -> list[str]:
    """Return the arguments after the last flag of this name, up to the next flag; [] if it is not given."""
    found: list[str] = []
    for i, word in enumerate(argv):
        if flag_name(word) != name:
            continue
        if "=" in word:
            found = [word.partition("=")[2]]
            continue
        rest = [*argv[i + 1 :], "--"]
        found = rest[: next(j for j, other in enumerate(rest) if other.startswith("--"))]
    return found


def flag_name(word: str) -> str:
    """Return the Python name of a flag: tp_layout.depth for --tp-layout.depth=2; "" for any other word."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def chosen_names(argv: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the choice of each of these flags: the word after the flag, or the default."""
    return {name: (words_of(argv, name) or [default])[0] for name, default in defaults.items()}


def options_flags(
    argv: Sequence[str], kinds: Kinds, names: Mapping[str, str], given: Mapping[str, Mapping[str, Any]]
) -> Any:
    """Return a dataclass for tyro with the options of the chosen names; its flags are --KIND.OPTION.

    names   the choice of each `Kind`, "" if there is none
    given   values that replace the options' defaults, by `Kind`

    Raises ValueError for an unknown name, an extra that cannot be imported, or a flag of another choice's option.
    """
    members = []
    for kind, name in names.items():
        cls = kinds[kind][name].options if name else None
        if cls is not None:
            members.append(_member(kind, option_fields(cls), given.get(kind, {})))
    _refuse_options_of_others(argv, kinds, names)
    return make_flags("Options", members)


def every_option(kinds: Kinds) -> Any:
    """Return `options_flags` for all choices that can be imported, for shell completion."""
    members = []
    for kind, choices in kinds.items():
        found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
        for choice in choices.usable().values():
            found |= {} if choice.options is None else option_fields(choice.options)
        members.append(_member(kind, found, {}))
    return make_flags("Options", members)


def option_fields(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return the fields of an options class with their types, by name."""
    hints = get_type_hints(cls)
    return {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls)}


def options_of(flags: Any) -> dict[str, dict[str, Any]]:
    """Return the values of `options_flags`, by the name of the `Kind`."""
    return {kind: vars(values) for kind, values in vars(flags).items()}


def make_flags(name: str, members: Iterable[tuple[str, Any, Any]], doc: str = "") -> Any:
    """Make a frozen dataclass with these (name, type, value) fields, and return an instance of it."""
    named = [(n, hint, dataclasses.field(default=value)) for n, hint, value in members]
    flags = dataclasses.make_dataclass(name, named, frozen=True)
    flags.__doc__ = doc
    return flags()


def make_flag(f: dataclasses.Field[Any], hint: Any, value: Any) -> tuple[str, Any, Any]:
    """Return a field of a configuration as a (name, type, value) field of flags."""
    hint = hint | None if f.default is None else hint
    return f.name, Annotated[hint, tyro.conf.arg(help=f.metadata.get("help"))], value


def _member(
    kind: str, fields: Mapping[str, tuple[dataclasses.Field[Any], Any]], given: Mapping[str, Any]
) -> tuple[str, type, Any]:
    flags = make_flags(
        kind, [make_flag(f, hint, given.get(name, f.default)) for name, (f, hint) in fields.items()]
    )
    return kind, type(flags), flags


def _refuse_options_of_others(argv: Sequence[str], kinds: Kinds, names: Mapping[str, str]) -> None:
    """Raise ValueError for a flag --KIND.OPTION that the chosen name does not have; the error says which name has it."""
    for word in argv:
        kind, _, option = flag_name(word).partition(".")
        if kind not in names or not option:
            continue
        own = kinds[kind][names[kind]].options if names[kind] else None
        known = {} if own is None else option_fields(own)
        if option not in known and option.removeprefix("no_") not in known:
            raise ValueError(_whose(word.partition("=")[0], kind, option, kinds[kind], names[kind]))


def _whose(flag: str, kind: str, option: str, choices: Kind[Any], chosen: str) -> str:
    options = {name: choice.options for name, choice in choices.usable().items() if choice.options}
    owners = [name for name, cls in options.items() if option in option_fields(cls)]
    now = f"{kind}={chosen}" if chosen else f"{as_flag(kind)} is not given"
    if owners:
        return f"{flag} is for {kind}={one_of(owners)}, and {now}; choose it, or leave {flag} out"
    of = f"no option of {now}" if chosen in options else f"no option, and {now}"
    classes = [options[chosen]] if chosen in options else options.values()
    flags = list(dict.fromkeys(as_flag(f"{kind}.{name}") for cls in classes for name in option_fields(cls)))
    return f"{flag} is {of}; use {one_of(flags, near=flag)}" if flags else f"{flag} is {of}; leave it out"
