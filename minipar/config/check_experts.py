"""The rules of expert parallelism: which ep sizes the mesh and the number of experts allow. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.support.errors import divisors, one_of, why_not_divisor

if TYPE_CHECKING:
    from minipar.config.train_config import TrainConfig


def check_experts(config: TrainConfig) -> None:
    """Raise ValueError if the experts do not fit the model's layers or the mesh."""
    model = config.model
    if model.num_experts and model.moe_every > model.num_layers:
        raise ValueError(
            f"num_experts={model.num_experts}: of num_layers={model.num_layers} layers, none has experts with "
            f"moe_every={model.moe_every}; use moe_every={model.num_layers} or less"
        )
    if why := why_ep_illegal(config.ep, config.dp * config.cp, model.num_experts):
        advice = f"; use {one_of(divisors(model.num_experts))}" if model.num_experts else "; leave it out"
        raise ValueError(why + advice)


def why_ep_illegal(ep: int, data_ranks: int, num_experts: int) -> str | None:
    """Return why ep cannot divide the experts over the dp*cp ranks that share the batch; None if it can."""
    if ep == 1:
        return None
    if not num_experts:
        return f"ep={ep} spreads experts, and num_experts=0: the model has none"
    return why_not_divisor("ep", ep, "num_experts", num_experts) or why_not_divisor(
        "ep", ep, "dp*cp", data_ranks
    )
