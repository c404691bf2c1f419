"""The schedule of a run's pipeline, and where it cuts samples into slices. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from minipar.cost.slices import equal_costs
from minipar.errors import one_of
from minipar.schedules.registry import SLICED, make_schedule
from minipar.schedules.schedule import Schedule


def schedule_of(config) -> Schedule:
    """The schedule of a TrainConfig's pipeline."""
    return _schedule(config.schedule, config.pp, config.microbatches, config.chunks, config.seq_slices)


@lru_cache(maxsize=16)  # a choice among meshes asks for each schedule once a mesh
def _schedule(name: str, p: int, m: int, chunks: int | None, slices: int) -> Schedule:
    return make_schedule(name, p, m, chunks, slices=slices)


def check_slices(config) -> None:
    """Raise ValueError where the samples of a TrainConfig cannot be cut into `seq_slices`."""
    slices = config.seq_slices
    if slices == 1:
        return
    if config.schedule not in SLICED:
        raise ValueError(
            f"seq_slices={slices} with schedule={config.schedule!r}, which has whole samples; use schedule={one_of(SLICED)}"
        )
    if config.cp > 1:
        raise ValueError(
            f"seq_slices={slices}: a slice sees those before it on its own rank, and cp={config.cp} spreads a sample over "
            "ranks; use one of the two"
        )
    if config.compile != "none":
        raise ValueError(
            f"seq_slices={slices} changes what attention sees from slice to slice, and compile={config.compile} makes one "
            "graph of it; use compile=none"
        )
    parts = -(-config.seq_len // _whole_tokens(config))
    if slices > parts:
        raise ValueError(
            f"seq_slices={slices} are more than the {parts} parts of seq_len={config.seq_len} {_why(config)}; "
            f"use {parts} or fewer"
        )


def slice_sizes(config) -> tuple[int, ...] | None:
    """Return the tokens of each slice, such that all pass through the stages soonest; None where samples are whole.

    A token costs a layer's matrices, and one product with each key and value up to its own: so later slices are shorter.
    """
    if config.seq_slices == 1:
        return None
    model = config.model
    matrices = (
        2 * model.dim * (model.dim + model.num_kv_heads * model.head_dim) + 3 * model.dim * model.hidden_dim
    )
    return equal_costs(config.seq_len, config.seq_slices, model.dim, matrices, _whole_tokens(config))


def _whole_tokens(config) -> int:
    """The tokens between two places at which a sample may be cut."""
    groups = (config.model.group_tokens or config.seq_len) if config.model.num_experts else 1
    return lcm(groups, config.tp if config.sequence_parallel else 1)


def _why(config) -> str:
    if config.model.num_experts:
        return f"that keep routing groups whole (group_tokens={config.model.group_tokens})"
    return f"that sequence_parallel cuts over tp={config.tp}" if config.sequence_parallel else "of one token"
