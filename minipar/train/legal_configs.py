"""The configurations that `minipar verify --all` compares with one process. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import get_args, get_type_hints

from minipar.errors import divisors, require_positive
from minipar.schedules import SCHEDULES
from minipar.schedules.registry import SLICED
from minipar.train.check_config import RECOMPUTE
from minipar.train.train_config import TrainConfig

OFFLOADS = get_args(get_type_hints(TrainConfig)["offload"])
RECOMPUTATIONS = (*RECOMPUTE, "every:2")


def legal_configs(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield every legal mesh of `world_size` ranks with every ZeRO stage and, where pp > 1, every schedule; then grids.

    Unless `base` says where states are, or what is recomputed, each ZeRO stage takes its turn with each `offload` and with
    each of RECOMPUTATIONS; and, where ep > 1, with each of `dispatches`. Schedules of slices cut samples in two at least.
    """
    again = {
        zero: cycle(RECOMPUTATIONS if base.recompute == "none" else [base.recompute]) for zero in range(4)
    }
    turns = {
        zero: cycle(OFFLOADS if zero and base.offload == "none" else [base.offload]) for zero in range(4)
    }
    ways = {zero: cycle(range(4)) for zero in range(4)}
    for pp, dp, cp in product(divisors(world_size), repeat=3):
        if world_size % (pp * dp * cp):
            continue
        tp = world_size // (pp * dp * cp)
        experts = divisors(dp * cp) if base.model.num_experts else [1]
        schedules = SCHEDULES if pp > 1 else ["1f1b"]
        for ep, zero, schedule in product(experts, range(4), schedules):
            sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, zero=zero, schedule=schedule)
            sizes["seq_slices"] = max(2, base.seq_slices) if schedule in SLICED and pp > 1 else 1
            try:
                config = replace(base, microbatches=2 if pp > 1 else 1, **sizes)
            except ValueError:
                continue  # not legal for this model or batch
            options = dict(offload=next(turns[zero]), recompute=next(again[zero]))
            if ep > 1 and base.ep_node_size is base.ep_shadow is None and base.ep_chunks == 1:
                options |= dispatches(ep)[next(ways[zero])]
            yield replace(config, **options)
    yield from _on_grids(base, world_size)


# (tp_layout, tp_depth) by the number of tp ranks
GRIDS = {4: [("2d", 1)], 8: [("2.5d", 2), ("3d", 1)], 9: [("2d", 1)]}


def _on_grids(base: TrainConfig, world_size: int) -> Iterator[TrainConfig]:
    """Yield meshes whose tp ranks are a grid or a cube: with each ZeRO stage, in `base`'s schedule."""
    for pp, cp, tp in product(divisors(world_size), divisors(world_size), GRIDS):
        if base.tp_layout != "1d" or world_size % (pp * cp * tp):
            continue
        sizes = dict(pp=pp, dp=world_size // (pp * cp * tp), cp=cp, tp=tp, seq_slices=1)
        for (layout, depth), zero in product(GRIDS[tp], range(4)):
            options = dict(tp_layout=layout, tp_depth=depth, zero=zero, microbatches=2 if pp > 1 else 1)
            try:
                yield replace(base, **sizes, **options)
            except ValueError:
                continue  # not legal for this model or batch


def dispatches(ep: int) -> list[dict]:
    """Return the options of ways to bring tokens to the experts of `ep` ranks, or hot experts to the tokens."""
    half = divisors(ep)[-2]
    return [{}, dict(ep_chunks=2), dict(ep_node_size=half, ep_once_per_node=True), dict(ep_shadow=0.0)]


def configs_to_verify(base: TrainConfig, world_size: int) -> list[TrainConfig]:
    """Return the legal configurations. Raises ValueError where there are none."""
    require_positive(world_size=world_size)
    configs = list(legal_configs(base, world_size))
    if not configs:
        raise ValueError(f"world_size={world_size}: no mesh of so many ranks is legal for this model")
    return configs
