"""Between the command line and configurations, which are dataclasses that check themselves."""

import dataclasses
from pathlib import Path


def settings_of(argv: list[str]) -> dict:
    """What the file of `--config` says: defaults, for the flags beside it."""
    from minipar.train.toml_config import read_settings

    for i, word in enumerate(argv):
        if word.startswith("--config="):
            return read_settings(Path(word.partition("=")[2]))
        if word == "--config" and i + 1 < len(argv):
            return read_settings(Path(argv[i + 1]))
    return {}


def unchecked(config, settings: dict):
    """The same configuration, of a class that takes any values: it is checked when the command runs."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    # What was derived from other fields is derived again from what they become.
    for f in dataclasses.fields(config):
        if f.default is None and dataclasses.replace(config, **{f.name: None}) == config:
            fields[f.name] = None
    given = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    fields |= given
    namespace = {"__post_init__": lambda self: None, "__doc__": type(config).__doc__, "__annotations__": {}}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value):
            fields[name] = unchecked(value, settings.get(name, {}))
            namespace["__annotations__"][name] = type(fields[name])
            namespace[name] = dataclasses.field(default=fields[name])
    flags = dataclasses.dataclass(frozen=True)(type(type(config).__name__, (type(config),), namespace))
    return flags(**fields)


def checked(flags):
    """The configuration of these flags. Raises ValueError for one that cannot be."""
    fields = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags)}
    fields = {
        name: checked(value) if dataclasses.is_dataclass(value) else value for name, value in fields.items()
    }
    return type(flags).__mro__[1](**fields)
