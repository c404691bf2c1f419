"""What a mixture of experts is: how many experts, who chooses whom, how much room there is, what keeps the load even."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction

from minipar.errors import one_of, require_positive

ROUTERS = ("top_k", "noisy_top_k", "expert_choice")
DROP_ORDERS = ("position", "weight")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The options of a `MoE`; ModelConfig has them too, where num_experts=0 means a model without experts.

    top_k            experts a token uses
    capacity_factor  room of an expert, in shares of an even load; None: room for all, nothing is dropped
    group_tokens     capacity and balance are kept per group of this many neighbouring positions of one sequence; a
                     group that the sequence's end cuts short has the room of a whole one. None: the sequence
    router           one of ROUTERS
    drop_order       who is served when an expert is full: the earlier "position", or the larger router "weight"
    jitter           in training, the router's input is multiplied by uniform numbers from [1 - jitter, 1 + jitter]
    balance_coef     weight of the balance loss; z_coef that of the router z-loss
    balance_bias     choose by probability plus a bias per expert, which `update_balance_bias` moves: balance without
                     a loss (arXiv:2408.15664)
    shared_dim       hidden width of an expert that every token uses; 0: there is none

    Raises ValueError where there can be no such mixture, saying what would work.
    """

    num_experts: int = 0
    top_k: int = 1
    capacity_factor: float | None = 1.25
    group_tokens: int | None = None
    router: str = "top_k"
    drop_order: str = "position"
    jitter: float = 0.0
    balance_coef: float = 1e-2
    z_coef: float = 1e-3
    balance_bias: bool = False
    shared_dim: int = 0

    def __post_init__(self):
        if self.num_experts:
            self._check_sizes()
            self._check_choices()
            self._check_numbers()

    @property
    def mixture_options(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(MixtureConfig)}

    def capacity(self, group_tokens: int) -> int:
        """How many of a group's tokens an expert has room for: ceil(k * T / E * capacity_factor), at most T.

        The factor is taken as it is written: 1.1 is 11/10, so that rounding never adds a place.
        Source: arXiv:2101.03961, equation 3, with the k of GShard.
        """
        if self.capacity_factor is None:
            return group_tokens
        share = Fraction(self.top_k * group_tokens, self.num_experts)
        return min(group_tokens, math.ceil(share * Fraction(str(self.capacity_factor))))

    def num_groups(self, batch: int, seq_len: int) -> int:
        """How many routing groups `batch` sequences have."""
        return batch * (1 if self.group_tokens is None else -(-seq_len // self.group_tokens))

    def _check_sizes(self):
        sizes = ["num_experts", "top_k"]
        sizes += [name for name in ("group_tokens", "shared_dim") if getattr(self, name)]
        require_positive(**{name: getattr(self, name) for name in sizes})
        if self.group_tokens == 0:
            raise ValueError("group_tokens=0; use 1 or more, or None for whole sequences")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} exceeds num_experts={self.num_experts}; use 1 to {self.num_experts}"
            )

    def _check_choices(self):
        for name, known in (("router", ROUTERS), ("drop_order", DROP_ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {one_of(known)}")
        if self.router == "expert_choice" and (self.capacity_factor is None or self.balance_bias):
            raise ValueError(
                f"capacity_factor={self.capacity_factor} and balance_bias={self.balance_bias} do not go with "
                "router='expert_choice', which fills every expert to its capacity; use a number above 0, and False"
            )

    def _check_numbers(self):
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
