"""An MoE layer that takes a Comm."""

from __future__ import annotations

from typing import Any

from minipar.comm import Comm
from minipar.expert.shard_experts import expert_parallel
from minipar.model import moe


class SwitchMoE(moe.MoE):
    """The model's `MoE`; with `comm`, each of the ep ranks of `comm` has num_experts / ep experts.

    Each rank passes its own tokens, [B, T, D] with any number of samples, and gets their results. Routing groups are runs
    of positions of one sample, so results do not depend on ep. Every rank of `comm` must call it, even without tokens.
    With or without `comm`, experts start from the same weights.
    Raises ValueError if ep does not divide num_experts.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor: float | None = 1.25,
        comm: Comm | None = None,
        **options: Any,
    ):
        super().__init__(dim, hidden_dim, num_experts, top_k, capacity_factor, **options)
        if comm is not None:
            expert_parallel(self, comm)
