"""A run's configuration as a TOML file, equivalent to the command's flags: to keep, and to run again."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from minipar.options import check_type
from minipar.train.train_config import TrainConfig


def read_settings(path: Path, cls: type = TrainConfig) -> dict[str, Any]:
    """Read the fields of a TrainConfig that a TOML file sets; the model's are a dict under "model".

        steps = 300
        dp = 2
        [model]
        num_layers = 8

    Raises ValueError, naming the file, where it cannot be read, or a setting does not exist or has the wrong type.
    """
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"config={path}: {error.strerror}; give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={path} is not TOML: {error}") from None
    return _checked(settings, cls, path)


def _checked(settings: dict, cls: type, path: Path) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: _value(name, value, hints, path) for name, value in settings.items()}


def _value(name: str, value, hints: dict, path: Path):
    if name not in hints:
        near = difflib.get_close_matches(name, hints, 1)
        meant = f"; did you mean {near[0]}?" if near else "; `minipar train --help` lists them"
        raise ValueError(f"config={path}: {name} is no setting{meant}")
    hint = hints[name]
    if is_dataclass(hint) and isinstance(value, dict):
        return _checked(value, hint, path)
    try:
        check_type(name, value, hint)
    except ValueError as error:
        raise ValueError(f"config={path}: {error}") from None
    return Path(value) if Path in get_args(hint) else value


def as_toml(config) -> str:
    """Format the configuration as TOML that `read_settings` reads; None is left out, since it is the default there."""
    plain, tables = [], []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            tables.append(f"\n[{field.name}]\n{as_toml(value)}")
        elif value is not None:
            plain.append(f"{field.name} = {_literal(value)}\n")
    return "".join(plain + tables)


def _literal(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
