"""Advice in errors, followed: the values that a refusal names are tried."""

import re

from minipar.config.train_config import TrainConfig

ADVICE = re.compile(r"\buse (?:model\.)?(\w+)=(\S+?)(?:,|;| or|$)")


def followed(config: TrainConfig, changes: dict) -> tuple[str, str]:
    """The refusal of a configuration with these changes, and that after its first advice NAME=VALUE; "" for none."""
    first = refusal(config, changes)
    advice = ADVICE.search(first)
    assert advice, f"no value is advised: {first}"
    name, value = advice[1], advice[2]
    return first, refusal(config, changes | {name: int(value) if value.isdigit() else value})


def refusal(config: TrainConfig, changes: dict) -> str:
    """The error of `config` with these changes, of its model if the model has a field of that name."""
    own = {
        name: value for name, value in changes.items() if name in vars(config.model) and name != "attention"
    }
    rest = {name: value for name, value in changes.items() if name not in own}
    try:
        config.choosing(model=type(config.model)(**vars(config.model) | own), **rest)
    except ValueError as error:
        return str(error)
    return ""
