"""Routing groups: consecutive positions of one sequence that share the experts' capacity.

Which tokens form a group depends on the model, never on the ranks. If a group were "the tokens on this rank", as in many
implementations, another number of ranks would drop other tokens, and thus train another model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.config.moe_config import cut_group
from minipar.model.value_check import assert_async


class RoutingGroups(NamedTuple):
    """The routing groups of [batch, tokens]: runs of `size` tokens, the last run of a sequence possibly shorter."""

    batch: int
    tokens: int
    size: int

    @property
    def per_sequence(self) -> int:
        return -(-self.tokens // self.size)

    @property
    def number(self) -> int:
        return self.batch * self.per_sequence

    def split(self, x: Tensor, fill: float = 0) -> Tensor:
        """Reshape [batch, tokens, ...] -> [number, size, ...], with short groups padded by `fill`."""
        missing = self.per_sequence * self.size - self.tokens
        if missing:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=fill)
        return x.reshape(self.number, self.size, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """Reshape [number, size, ...] -> [batch * tokens, ...], without the padding that `split` added."""
        x = x.reshape(self.batch, self.per_sequence * self.size, *x.shape[2:])
        return x[:, : self.tokens].flatten(0, 1)

    def real(self, device: torch.device | None = None) -> Tensor:
        """Return the mask of tokens, [number, size]: False for padding."""
        return self.split(torch.ones(self.batch, self.tokens, 1, dtype=torch.bool, device=device))[..., 0]

    def of_tokens(self, device: torch.device | None = None) -> Tensor:
        """Return the index of each token's group, [batch * tokens]."""
        numbers = torch.arange(self.number, device=device)
        return self.join(numbers[:, None, None].expand(-1, self.size, 1))[:, 0]


def check_whole_groups(positions: Tensor, group_tokens: int | None) -> None:
    """Raise ValueError unless the tokens at these positions form whole groups: the layout must not cut a group.

    positions     [T] or [B, T]
    group_tokens  the size of a group; None: a group is a whole sequence

    A group must begin at a multiple of its size and continue with consecutive positions. If a group is cut in two, the
    rank that has the second part raises.
    """
    length = positions.shape[-1]
    size = group_tokens or max(1, length)
    place = torch.arange(length, device=positions.device)
    starts = positions[..., place // size * size]
    is_aligned = starts % size == 0 if group_tokens is not None else starts == 0
    whole = ((positions - starts == place % size) & is_aligned).all()
    if assert_async(whole, f"these positions cut a routing group of group_tokens={group_tokens} in two"):
        return
    row = positions.reshape(-1, positions.shape[-1])[0].tolist()
    raise ValueError(cut_group(row, group_tokens))
