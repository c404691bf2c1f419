"""The configuration that a printed `minipar train` command describes."""

import shlex
from dataclasses import fields

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig


def config_of(line: str) -> TrainConfig:
    """Read the command's flags: the run's, --model's, and those of what it chooses by name."""
    words, found = shlex.split(line)[2:], {"": {}}
    types = {f.name: f.type for f in fields(TrainConfig)} | {f.name: f.type for f in fields(ModelConfig)}
    while words:
        prefix, _, name = words.pop(0).removeprefix("--").replace("-", "_").rpartition(".")
        value = words.pop(0) if words and not words[0].startswith("--") else True
        kind = types.get(name, "int").split()[0]
        read = int if kind == "int" or name == "zero" else float if kind == "float" else lambda word: word
        found.setdefault(prefix, {})[name] = read(value)
    model = ModelConfig(**found.pop("model"))
    return TrainConfig(model=model, **found.pop(""), options=found)
