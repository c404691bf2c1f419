"""The configurations that `minipar verify --all` compares with one process. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import get_args, get_type_hints

from minipar.errors import divisors, require_positive
from minipar.schedules import SCHEDULES
from minipar.train.check_config import RECOMPUTE
from minipar.train.train_config import TrainConfig

OFFLOADS = get_args(get_type_hints(TrainConfig)["offload"])
RECOMPUTATIONS = (*RECOMPUTE, "every:2")


def legal_configs(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield every legal mesh of `world_size` ranks with every ZeRO stage and, where pp > 1, every schedule.

    Unless `base` says where states are, or what is recomputed, each ZeRO stage takes its turn with each `offload` and with
    each of RECOMPUTATIONS.
    """
    again = {
        zero: cycle(RECOMPUTATIONS if base.recompute == "none" else [base.recompute]) for zero in range(4)
    }
    turns = {
        zero: cycle(OFFLOADS if zero and base.offload == "none" else [base.offload]) for zero in range(4)
    }
    for pp, dp, cp in product(divisors(world_size), repeat=3):
        if world_size % (pp * dp * cp):
            continue
        tp = world_size // (pp * dp * cp)
        experts = divisors(dp * cp) if base.model.num_experts else [1]
        schedules = SCHEDULES if pp > 1 else ["1f1b"]
        for ep, zero, schedule in product(experts, range(4), schedules):
            sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, zero=zero, schedule=schedule)
            try:
                config = replace(base, microbatches=2 if pp > 1 else 1, **sizes)
            except ValueError:
                continue  # not legal for this model or batch
            yield replace(config, offload=next(turns[zero]), recompute=next(again[zero]))


def configs_to_verify(base: TrainConfig, world_size: int) -> list[TrainConfig]:
    """Return the legal configurations. Raises ValueError where there are none."""
    require_positive(world_size=world_size)
    configs = list(legal_configs(base, world_size))
    if not configs:
        raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
    return configs
