"""Routing groups: neighbouring positions of one sequence that share the experts' room.

A group is a property of the model, never of who computes it. Were it "the tokens on this rank", as is often seen, another
number of ranks would drop other tokens, and be another model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minipar.model.moe_config import cut_group


class Groups(NamedTuple):
    """The groups of [batch, tokens] in runs of `size`, the last of a sequence possibly short."""

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
        """[batch, tokens, ...] -> [number, size, ...], short groups filled up."""
        missing = self.per_sequence * self.size - self.tokens
        if missing:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing), value=fill)
        return x.reshape(self.number, self.size, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """[number, size, ...] -> [batch * tokens, ...]: what `split` filled up is left out again."""
        x = x.reshape(self.batch, self.per_sequence * self.size, *x.shape[2:])
        return x[:, : self.tokens].flatten(0, 1)

    def real(self, device=None) -> Tensor:
        """[number, size]: False where there is no token."""
        return self.split(torch.ones(self.batch, self.tokens, 1, dtype=torch.bool, device=device))[..., 0]

    def of_tokens(self, device=None) -> Tensor:
        """[batch * tokens]: the number of each token's group."""
        numbers = torch.arange(self.number, device=device)
        return self.join(numbers[:, None, None].expand(-1, self.size, 1))[:, 0]


def check_whole_groups(positions: Tensor, group_tokens: int | None) -> None:
    """Raise ValueError where tokens at these positions are not whole groups: a layout has cut one.

    positions  [T] or [B, T]    group_tokens  None for a whole sequence

    A group must begin at a multiple of its size and go on position by position. A group cut in two shows on the rank
    that has its second part.
    """
    length = positions.shape[-1]
    size = group_tokens or max(1, length)
    place = torch.arange(length, device=positions.device)
    starts = positions[..., place // size * size]
    begins_well = starts % size == 0 if group_tokens is not None else starts == 0
    if ((positions - starts == place % size) & begins_well).all():
        return
    row = positions.reshape(-1, positions.shape[-1])[0].tolist()
    raise ValueError(cut_group(row, group_tokens))
