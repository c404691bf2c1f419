"""Read and write a run's configuration as a TOML file, equivalent to the command's flags, to keep and to run again."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from minipar.config.choices import CHOSEN
from minipar.config.model_config import DerivedSize
from minipar.config.train_config import TrainConfig
from minipar.support.options import check_type, make_options


def read_settings(path: Path) -> dict[str, Any]:
    """Read the fields of a TrainConfig that a TOML file sets; the model's are a dict under "model".

        steps = 300
        compress = "sign"
        [model]
        num_layers = 8
        [schedule]
        name = "seq1f1b"
        slices = 4

    A table such as [schedule] holds the name of a choice and its options, which are returned under "options":
    {"schedule": {"slices": 4}}. A table without a name sets the options of the default choice.

    Raises ValueError, naming the file, if it cannot be read, or a setting does not exist or has the wrong type.
    """
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"config={path}: {error.strerror}; give a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={path} is not TOML: {error}") from None
    try:
        return _checked_run(tables)
    except ValueError as error:
        raise ValueError(f"config={path}: {error}") from None


def _checked_run(tables: dict[str, Any]) -> dict[str, Any]:
    settings, options = dict(tables), {}
    for name in CHOSEN:
        if isinstance(table := settings.get(name), dict):
            options[name] = dict(table)
            settings[name] = options[name].pop("name", TrainConfig.__dataclass_fields__[name].default)
    checked = _checked(settings, TrainConfig)
    for name, values in options.items():
        options[name] = _checked_options(name, checked[name], values)
    return checked | ({"options": options} if options else {})


def _checked_options(name: str, chosen: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the given options of a choice, checked by its options class. Raises ValueError for an unknown option."""
    cls = CHOSEN[name][chosen].options
    if values and cls is None:
        given = ", ".join(f"{name}.{own}" for own in values)
        raise ValueError(f"{given}: {name}={chosen} has no options; leave it out, or choose another")
    made = None if cls is None else make_options(cls, name, values)
    return {own: getattr(made, own) for own in values}


def _checked(settings: dict[str, Any], cls: type) -> dict[str, Any]:
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name != "options"}
    return {name: _value(name, value, hints) for name, value in settings.items()}


def _value(name: str, value: Any, hints: dict[str, Any]) -> Any:
    if name not in hints:
        near = difflib.get_close_matches(name, hints, 1)
        meant = f"; did you mean {near[0]}?" if near else "; `minipar train --help-all` lists them"
        raise ValueError(f"{name} is no setting{meant}")
    hint = hints[name]
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _checked(value, hint)
    check_type(name, value, hint)
    return Path(value) if Path in get_args(hint) else value


def as_toml(config: TrainConfig) -> str:
    """Format the configuration as TOML for `read_settings`. Settings that are None are left out: None is their default."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    model = vars(values.pop("model"))
    tables = {"model": {name: v for name, v in model.items() if not isinstance(v, DerivedSize)}}
    for name, options in values.pop("options").items():
        if any(value is not None for value in vars(options).values()):
            tables[name] = {"name": values.pop(name), **vars(options)}
    plain = _assignments(values)
    return plain + "".join(f"\n[{name}]\n{_assignments(table)}" for name, table in tables.items())


def _assignments(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {_literal(value)}\n" for name, value in values.items() if value is not None)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
