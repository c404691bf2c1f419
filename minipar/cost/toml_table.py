"""Read a dataclass from a TOML file, such as the user's own machine or model."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_type_hints

from minipar.support.errors import one_of
from minipar.support.options import check_type

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def find(kind: str, name: str, table: dict[str, T], cls: type[T]) -> T:
    """Return the entry `name` of the table; if `name` ends in .toml, read it from that file.

    Raises ValueError, with the nearest names, for an unknown name.
    """
    if name.endswith(".toml"):
        return read(kind, Path(name), cls)
    if name not in table:
        near = [known for known in table if known.startswith(name)] or difflib.get_close_matches(
            name, table, 3
        )
        meant = f"; did you mean {one_of(near)}?" if near and name else ""
        raise ValueError(f"{kind}={name!r} is unknown; use a .toml file, {one_of(table)}{meant}")
    return table[name]


def read(kind: str, path: Path, cls: type[T]) -> T:
    """Read a `cls` from a TOML file with a value for each field that has no default. `name` defaults to the file's stem.

    Raises ValueError, naming the file, if a field is missing or unknown, has a wrong type, or a value that `cls` refuses.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{kind}={path}: {error.strerror}; give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{kind}={path} is not TOML: {error}") from None
    hints = get_type_hints(cls)
    values = {"name": path.stem} | values
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{kind}={path}: {name!r} is no field; use {one_of(hints, near=name)}")
        try:
            check_type(name, value, hints[name])
        except ValueError as error:
            raise ValueError(f"{kind}={path}: {error}") from None
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{kind}={path} lacks {', '.join(missing)}; add it")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{kind}={path}: {error}") from None
