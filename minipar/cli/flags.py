"""Convert a run's configuration to flags and back. Flags are dataclasses for tyro, one per group of settings, unchecked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from minipar.cli.choices import (
    chosen_names,
    every_option,
    make_flag,
    make_flags,
    options_flags,
    options_of,
    words_of,
)
from minipar.config.choices import CHOSEN

# In the order of `--help`.
HEADINGS = {
    "mesh": "Who computes what. Any mesh gives the same losses.",
    "messages": "Cheap messages: gradients compressed, or sent more rarely.",
    "memory": "What is kept, and where.",
    "model": "The model: its numbers depend on these and on the seed, never on the mesh.",
    "mixture": "Experts, in short.",
    "optimization": "The batch and the optimizer.",
    "precision": "Dtypes, the loss scale, and what is done about nan.",
    "data": "The text, and what is drawn at random.",
    "run": "What a run writes, keeps and compares.",
}
Shown = Callable[[str, dataclasses.Field[Any]], bool]  # (name of a group, a field in it) -> shown?

_CONFIG_HELP = "a TOML file with these settings; flags override it. Every run writes its own, as config.toml"
_CONFIG_FLAG = ("config", Annotated[Path | None, tyro.conf.arg(help=_CONFIG_HELP)], None)


def settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the file given by `--config`, which are the defaults of the other flags."""
    from minipar.config.toml_config import read_settings

    path = words_of(argv, "config")
    return read_settings(Path(path[0])) if path else {}


def flags_of(
    config: Any, settings: dict[str, Any], argv: Sequence[str] | None = (), shown: Shown | None = None
) -> Any:
    """Return the settings of a TrainConfig as a tree of dataclasses, one per heading of `--help`.

    settings   values from a file, which replace `config`'s values
    argv       the arguments. The options of the choices made by them, the file or `config` become flags. None: the options
               of every choice become flags, for shell completion
    shown      for `--help`: only the fields for which it returns True are in the tree, and no options

    Raises ValueError if a name is unknown, or an option in `argv` is another choice's.
    """
    values = _values_of(config) | {k: v for k, v in settings.items() if k not in ("model", "options")}
    hints = get_type_hints(type(config))
    hints |= {name: Literal[tuple(kind)] for name, kind in CHOSEN.items()}
    members = _groups(config, hints, values, shown)
    model = _model_flags(config.model, settings.get("model", {}), shown)
    if dataclasses.fields(model):
        members["model"] = ("model", type(model), model)
    in_order = [members[name] for name in HEADINGS if name in members]
    if shown is None:
        if argv is None:
            options = every_option(CHOSEN)
        else:
            names = chosen_names(argv, {name: values[name] for name in CHOSEN})
            options = options_flags(argv, CHOSEN, names, _given_options(config, settings, names))
        in_order.append(("options", Annotated[type(options), tyro.conf.arg(name="")], options))
    return make_flags("TrainConfig", in_order)


def config_of(flags: Any, cls: type) -> Any:
    """Return the configuration that these flags describe. Raises ValueError if it is invalid."""
    return cls(**_values_of_flags(flags, get_type_hints(cls)))


def _groups(
    config: Any, hints: dict[str, Any], values: dict[str, Any], shown: Shown | None
) -> dict[str, Any]:
    """Return a member of the tree for each heading, by its name. Its flags have no prefix."""
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for f in dataclasses.fields(config):
        group = f.metadata.get("group")
        if group and (shown is None or shown(group, f)):
            groups.setdefault(group, []).append(make_flag(f, hints[f.name], values[f.name]))
    if "run" in groups:
        groups["run"].append(_CONFIG_FLAG)
    made = {name: make_flags(name.capitalize(), inside, HEADINGS[name]) for name, inside in groups.items()}
    unprefixed: Any = tyro.conf.OmitArgPrefixes
    return {name: (name, unprefixed[type(flags)], flags) for name, flags in made.items()}


def _model_flags(model: Any, settings: dict[str, Any], shown: Shown | None) -> Any:
    """Return the flags of the model's own sizes, then those of inherited fields, which are its experts' options."""
    values, hints = _values_of(model) | settings, get_type_hints(type(model))
    own = type(model).__annotations__
    fields = sorted(dataclasses.fields(model), key=lambda f: f.name not in own)
    members = [
        make_flag(f, hints[f.name], values[f.name]) for f in fields if shown is None or shown("model", f)
    ]
    return make_flags("Model", members, HEADINGS["model"])


def _values_of(config: Any) -> dict[str, Any]:
    """Return the values by name. Values derived from other settings are None again, since flags may change those."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for f in dataclasses.fields(config):
        if f.default is None and dataclasses.replace(config, **{f.name: None}) == config:
            values[f.name] = None
    return values


def _given_options(config: Any, settings: dict[str, Any], names: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the values that the file, or else `config`, gives to the options of the chosen names."""
    given: dict[str, dict[str, Any]] = {}
    for name, chosen in names.items():
        if chosen == getattr(config, name) and name in config.options:
            given[name] = dict(vars(config.options[name]))
        if chosen == settings.get(name) and name in settings.get("options", {}):
            given[name] = given.get(name, {}) | settings["options"][name]
    return given


def _values_of_flags(flags: Any, hints: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(flags):
        value = getattr(flags, f.name)
        if f.name == "options":
            values["options"] = options_of(value)
        elif f.name in hints and dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = config_of(value, hints[f.name])
        elif dataclasses.is_dataclass(value):
            values |= _values_of_flags(value, hints)
        elif f.name in hints:
            values[f.name] = value
    return values
