"""The places where a run's samples are cut into slices, and a check that they can be cut. Imports no torch."""

from __future__ import annotations

from functools import cache
from math import lcm
from typing import TYPE_CHECKING

from minipar.cost.models import ModelShape, dense_matmul_elems
from minipar.extras.schedules.sequence_slices import slice_tokens

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig

MOST_PARTS = 64  # about this many positions of a cut are tried


def check_slices(config: TrainConfig) -> None:
    """Raise ValueError if the samples of a TrainConfig cannot be cut into `schedule.slices` slices."""
    slices, seq_len = config.options["schedule"].slices, config.seq_len
    if slices < 2:
        raise ValueError(f"schedule.slices={slices} cuts no sample; use 2 or more, or schedule=1f1b")
    if config.cp > 1:
        raise ValueError(
            f"schedule.slices={slices}: a slice sees those before it on its own rank, and cp={config.cp} spreads a sample "
            "over ranks; use one of the two"
        )
    parts = -(-seq_len // _whole_tokens(config))
    if slices > parts:
        raise ValueError(
            f"schedule.slices={slices} are more than the {parts} parts of seq_len={seq_len} {_parts_of(config)}; use "
            f"{parts} or fewer"
        )
    if config.compile != "none":
        raise ValueError(
            f"schedule.slices={slices} changes what attention sees from slice to slice, and compile={config.compile} makes "
            "one graph of it; use compile=none"
        )


def slice_sizes(config: TrainConfig) -> tuple[int, ...]:
    """Return each slice's number of tokens, so that a step takes the least time."""
    slices, model = config.options["schedule"].slices, config.model
    matrices = dense_matmul_elems(ModelShape.of(model))
    return equal_costs(config.seq_len, slices, model.core_width // 2, matrices, _whole_tokens(config))


def _whole_tokens(config: TrainConfig) -> int:
    """Return the number of tokens at whose multiples a sample may be cut: routing groups, and equal parts for tp."""
    groups = (config.model.group_tokens or config.seq_len) if config.model.num_experts else 1
    return lcm(groups, config.tp if config.sequence_parallel else 1)


def _parts_of(config: TrainConfig) -> str:
    if config.model.num_experts:
        return f"that keep routing groups whole (group_tokens={config.model.group_tokens})"
    return f"that sequence_parallel cuts over tp={config.tp}" if config.sequence_parallel else "of one token"


@cache
def equal_costs(seq_len: int, slices: int, dim: int, matrices: int, whole: int) -> tuple[int, ...]:
    """Cut a sample into slices of nearly equal cost, at multiples of `whole` tokens.

    A token costs a layer's `matrices` plus the products with the keys and values of all tokens up to itself, so later
    slices are shorter. However the sample is cut, the total cost is the same. So the best cut is the one whose most
    expensive slice is cheapest, for any number of stages and microbatches.
    """
    multiple = whole * max(1, seq_len // (whole * max(MOST_PARTS, 4 * slices)))

    def cost(before: int, tokens: int) -> int:
        return slice_cost(before, tokens, dim, matrices)

    return slice_tokens(seq_len, slices, cost, multiple=multiple)


def slice_cost(before: int, tokens: int, dim: int, matrices: int) -> int:
    """Return the multiplications in a layer's forward for `tokens` tokens that follow `before` tokens of their sample."""
    return tokens * matrices + 2 * dim * (tokens * before + tokens * (tokens + 1) // 2)
