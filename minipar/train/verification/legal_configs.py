"""The configurations that `minipar verify --all` compares with one process. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from minipar.config.choices import CHOSEN
from minipar.config.rules import RECOMPUTE
from minipar.config.train_config import TrainConfig
from minipar.support.errors import divisors, require_positive

RECOMPUTATIONS = (*RECOMPUTE, "every:2")
Named = tuple[str, dict[str, Any]]  # a choice by name, with options


def legal_configs(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield every legal mesh of `world_size` ranks with every ZeRO stage, every schedule if pp > 1, and every tp layout.

    Schedules and layouts of installed extras are included. The modes of recomputation, the memories for optimizer states
    and, if ep > 1, the token dispatches do not multiply the number of configurations: those of a ZeRO stage use them in
    turn, unless `base` names one.
    """
    turns = _Turns(base)
    for sizes in _mesh_sizes(base, world_size):
        for schedule in _named("schedule", base) if sizes["pp"] > 1 else [("1f1b", {})]:
            for zero in range(4):
                config = _legal(base, **sizes, zero=zero, schedule=schedule)
                if config is not None:
                    yield turns.applied(config)
    if base.tp_layout == "1d":
        yield from _other_layouts(base, world_size)


def _mesh_sizes(base: TrainConfig, world_size: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of every mesh of `world_size` ranks, with two microbatches if pp > 1."""
    for pp, dp, cp in product(divisors(world_size), repeat=3):
        if world_size % (pp * dp * cp) == 0:
            for ep in divisors(dp * cp) if base.model.num_experts else [1]:
                tp = world_size // (pp * dp * cp)
                yield dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, microbatches=2 if pp > 1 else 1)


def _other_layouts(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield meshes with every tp layout other than 1d and each ZeRO stage, in `base`'s schedule."""
    for sizes in _mesh_sizes(base, world_size):
        wanted = SimpleNamespace(**{**vars(base), **sizes})  # may be illegal with layout 1d
        for layout in _named("tp_layout", wanted) if sizes["ep"] == 1 else []:
            for zero in range(4) if layout[0] != "1d" else ():
                config = _legal(base, **sizes, zero=zero, tp_layout=layout)
                if config is not None:
                    yield config


class _Turns:
    """Recomputation modes, memories for optimizer states, and dispatches, used in turn, separately for each ZeRO stage."""

    def __init__(self, base: TrainConfig):
        self._base, self._turn, self._dispatched = base, Counter[int](), Counter[tuple[int, str]]()

    def applied(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with the next recomputation mode, memory and dispatch."""
        zero, base = config.zero, self._base
        turn, self._turn[zero] = self._turn[zero], self._turn[zero] + 1
        if base.recompute == "none":
            config = replace(config, recompute=RECOMPUTATIONS[turn % len(RECOMPUTATIONS)])
        if config.ep > 1 and base.choosing(dispatch="all-to-all") == base:
            # The one tried least so far: not every dispatch is legal with every mesh.
            way = min(_named("dispatch", config), key=lambda named: self._dispatched[zero, named[0]])
            config = config.choosing(dispatch=way)
            self._dispatched[zero, way[0]] += 1
        if base.offload == "none" and zero:
            memories = _named("offload", base)
            config = _legal(config, offload=memories[turn % len(memories)]) or config
        return config


def _named(field: str, config: TrainConfig | SimpleNamespace) -> list[Named]:
    """Return the choices, with options, to try for this field; only `config`'s own choice if that is not the default."""
    chosen, default = getattr(config, field), TrainConfig.__dataclass_fields__[field].default
    if chosen != default and field != "schedule":
        return [(chosen, vars(config.options[field]) if field in config.options else {})]
    choices = CHOSEN[field].usable().items()
    return [(name, options) for name, choice in choices for options in choice.variants(config)]


def _legal(config: TrainConfig, **changes: Any) -> TrainConfig | None:
    """Return the configuration with these changes; None if it is not legal for this model or batch."""
    try:
        return config.choosing(**changes)
    except ValueError:
        return None


def configs_to_verify(base: TrainConfig, world_size: int) -> list[TrainConfig]:
    """Return the legal configurations. Raises ValueError if there are none."""
    require_positive(world_size=world_size)
    configs = list(legal_configs(base, world_size))
    if not configs:
        raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
    return configs
