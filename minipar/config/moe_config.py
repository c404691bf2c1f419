"""The options of MoE layers: number of experts, routing, capacity, and load balancing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from minipar.support.errors import require_divides, require_positive
from minipar.support.options import check_types, normalise_types, option, with_option_table

Router = Literal["top_k", "noisy_top_k", "expert_choice"]
DropOrder = Literal["position", "weight"]


@with_option_table
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The options of MoE layers. ModelConfig inherits them, and num_experts=0 means a model without experts.

    A routing group is a property of the model, not of a layout. A group that the sequence's end cuts short has the same
    capacity as a full group. Raises ValueError for invalid or incompatible options; the message says what would work.
    """

    num_experts: int = option(0, "number of experts in each mixture; 0: no mixtures", common=True)
    top_k: int = option(1, "number of experts that a token uses")
    capacity_factor: float | None = option(
        1.25, "capacity of an expert, relative to an even load; None: unlimited, so that no token is dropped"
    )
    group_tokens: int | None = option(
        None,
        "successive positions of a sequence that form a routing group, with its own capacities and balance loss; None: all",
    )
    router: Router = option(
        "top_k", "whether tokens choose their experts (with or without noise) or experts choose their tokens"
    )
    drop_order: DropOrder = option(
        "position",
        "which tokens a full expert keeps: those at earlier positions, or with larger router weights",
    )
    jitter: float = option(
        0.0, "in training, multiply the router's input by uniform numbers from [1 - jitter, 1 + jitter]"
    )
    balance_coef: float = option(1e-2, "weight of the balance loss")
    z_coef: float = option(1e-3, "weight of the router z-loss")
    balance_bias: bool = option(
        False, "choose by probability plus a bias per expert that follows the load (arXiv:2408.15664)"
    )
    random_second: bool = option(
        False,
        "with top_k=2, in training: use the second expert at random, with a probability of twice its weight",
    )
    expert_nodes: int | None = option(
        None, "with nodes_per_token, the number of nodes over which the experts are divided, in order"
    )
    nodes_per_token: int | None = option(None, "the most nodes whose experts a token may use; None: no limit")
    shared_dim: int = option(0, "hidden width of an expert that every token uses; 0: there is none")

    def __post_init__(self) -> None:
        check_types(self)
        normalise_types(self)
        if self.num_experts:
            self._check_sizes()
            self._check_choices()
            self._check_nodes()
            self._check_numbers()

    @property
    def moe_options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(MoEConfig)}

    def capacity(self, group_tokens: int) -> int:
        """Return how many of a group's T tokens one expert accepts: ceil(k * T / E * capacity_factor), at most T.

        The factor is read as a decimal fraction: 1.1 is exactly 11/10, so float rounding never adds a token.
        Source: arXiv:2101.03961, equation 3, with the k of GShard.
        """
        if self.capacity_factor is None:
            return group_tokens
        share = Fraction(self.top_k * group_tokens, self.num_experts)
        return min(group_tokens, math.ceil(share * Fraction(str(self.capacity_factor))))

    def num_groups(self, batch: int, seq_len: int) -> int:
        """Return the number of routing groups in `batch` sequences."""
        return batch * (1 if self.group_tokens is None else -(-seq_len // self.group_tokens))

    def _check_sizes(self) -> None:
        sizes = ["num_experts", "top_k"]
        sizes += [name for name in ("group_tokens", "shared_dim") if getattr(self, name)]
        require_positive(**{name: getattr(self, name) for name in sizes})
        if self.group_tokens == 0:
            raise ValueError("group_tokens=0; use 1 or more, or None for whole sequences")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} exceeds num_experts={self.num_experts}; use 1 to {self.num_experts}"
            )

    def _check_choices(self) -> None:
        if self.router == "expert_choice" and (self.capacity_factor is None or self.balance_bias):
            raise ValueError(
                f"capacity_factor={self.capacity_factor} and balance_bias={self.balance_bias} do not go with "
                "router='expert_choice', which fills every expert to its capacity; use a number above 0, and False"
            )

        if self.random_second and (self.top_k != 2 or self.router == "expert_choice"):
            raise ValueError(
                f"random_second=True with top_k={self.top_k} and router={self.router!r}: there is no second expert of a "
                "token; use top_k=2 with a router of tokens, or random_second=False"
            )

    def _check_nodes(self) -> None:
        nodes, limit = self.expert_nodes, self.nodes_per_token
        if (nodes is None) != (limit is None):
            raise ValueError(
                f"expert_nodes={nodes} with nodes_per_token={limit}: use both, or neither, to use any node's experts"
            )
        if nodes is None or limit is None:
            return
        require_divides("expert_nodes", nodes, "num_experts", self.num_experts)
        least = -(-self.top_k * nodes // self.num_experts)
        if not least <= limit <= nodes:
            raise ValueError(
                f"nodes_per_token={limit}: top_k={self.top_k} experts of {self.num_experts} on expert_nodes={nodes} are on "
                f"{least} nodes or more; use {least} to {nodes}"
            )
        if self.router == "expert_choice":
            raise ValueError(
                f"nodes_per_token={limit} does not go with router='expert_choice', in which experts choose; leave it out"
            )

    def _check_numbers(self) -> None:
        factor = self.capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                f"capacity_factor={factor} is not a share of the load; use a number above 0, or None to drop nothing"
            )
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter} is not a part of the input; use 0 <= jitter < 1")
        for name in ("balance_coef", "z_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not the weight of a loss; use 0 or more")


def require_whole_groups(positions: list[int], group_tokens: int) -> None:
    """Raise ValueError unless these positions form whole routing groups."""
    for first in range(0, len(positions), group_tokens):
        group = positions[first : first + group_tokens]
        if group[0] % group_tokens or group != list(range(group[0], group[0] + len(group))):
            raise ValueError(cut_group(positions, group_tokens))


def cut_group(positions: list[int], group_tokens: int | None) -> str:
    """Return the error message for positions of one sample that contain only part of a routing group."""
    what = "whole sequences" if group_tokens is None else f"group_tokens={group_tokens} positions"
    brief = positions if len(positions) <= 6 else f"{positions[0]}, {positions[1]} ... {positions[-1]}"
    return (
        f"{len(positions)} tokens at positions {brief} are not whole routing groups, which are {what}: "
        "a layout has cut one; use a group_tokens that divides each rank's run of positions"
    )
