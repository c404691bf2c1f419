"""Configuration fields declared once, with help and group, for `--help`, pydoc and TOML; and checks of their types."""

from __future__ import annotations

import math
from dataclasses import field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from minipar.support.errors import one_of


def option(default: Any, help: str, group: str = "", common: bool = False) -> Any:
    """Declare a configuration field.

    group    the heading under which its flag is listed, and the TOPIC of `--help TOPIC` that shows it
    common   whether `--help` alone shows it
    """
    return field(default=default, metadata={"help": help, "group": group, "common": common})


def with_option_table(cls: type) -> type:
    """Append the table of options to the class's docstring."""
    lines = [f"    {f.name:22}{f.metadata['help']}" for f in fields(cls) if f.metadata.get("help")]
    cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n" + "\n".join(lines) + "\n"
    return cls


def check_types(config: object) -> None:
    """Raise ValueError, naming the field, if a value does not have its field's type or is not one of its choices.

    A float field also accepts a Python or numpy integer; no field accepts nan or infinity.
    """
    for name, hint in _field_types(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        check_type(name, getattr(config, name), hint)


@cache  # evaluating annotations takes a hundred times as long as checking values
def _field_types(cls: type) -> dict[str, Any]:
    """Return field name -> type; the type includes None if None is the field's default."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] | None if f.default is None else hints[f.name] for f in fields(cls)}


@cache
def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union in either notation; for any other type, the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_type(name: str, value: object, hint: Any) -> None:
    kinds = _kinds(hint)
    if any(_has_type(value, kind) for kind in kinds):
        return
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        raise ValueError(f"{name}={value!r} is unknown; use {one_of(choices, near=value)}")
    wanted = " or ".join(_type_name(kind) for kind in kinds if kind is not NoneType)
    if isinstance(value, float) and float in kinds:
        raise ValueError(f"{name}={value!r} is no number to compute with; use a finite one")
    raise ValueError(f"{name}={value!r} is a {type(value).__name__}; use {wanted}")


@cache  # a configuration's fields have a few types, and are checked thousands of times
def _origin(kind: Any) -> Any:
    return get_origin(kind)


def _has_type(value: Any, kind: Any) -> bool:
    origin = _origin(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_has_type(one, get_args(kind)[0]) for one in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return hasattr(value, "__index__")
    if kind is float:
        return (hasattr(value, "__index__") or isinstance(value, float)) and math.isfinite(value)
    if kind is Path:
        return isinstance(value, Path | str)
    return isinstance(value, origin or kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list, each {_type_name(get_args(kind)[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", Path: "a path"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def make_options(cls: type, of: str, values: Any) -> Any:
    """Return an instance of the options class `cls` from a dict. Raises ValueError, naming `of.name`, if it is invalid."""
    if not isinstance(values, dict):
        raise ValueError(f"options[{of!r}] is a {type(values).__name__}; use a dict or a {cls.__name__}")
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            choices = one_of((f"{of}.{own}" for own in known), near=f"{of}.{name}")
            raise ValueError(f"{of}.{name} is no option; use {choices}")
    made = cls(**values)
    for name, hint in _field_types(cls).items():
        check_type(f"{of}.{name}", getattr(made, name), hint)
    normalise_types(made)
    return made


def normalise_types(config: object) -> None:
    """Convert every field in place to the Python type of its annotation: str to Path, numpy integer to int or float."""
    for name, hint in _field_types(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        kinds = _kinds(hint)
        plain = value
        if isinstance(value, str) and Path in kinds:
            plain = Path(value)
        elif isinstance(value, tuple | list):
            plain = tuple(float(x) if float in get_args(kinds[0]) else x for x in value)
        elif not isinstance(value, bool) and hasattr(value, "__index__"):
            plain = float(value) if float in kinds and int not in kinds else int(value)
        if type(plain) is not type(value) or isinstance(plain, tuple):
            object.__setattr__(config, name, plain)
