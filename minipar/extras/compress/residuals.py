"""The residuals of tensors that ranks average together: what a rank has not sent of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.extras.compress.codecs import require_finite
from minipar.extras.compress.plain_mean import State, Tensors, cut, fused, widened


class Residuals:
    """Error feedback for tensors, by key: `residuals[key]` is what was not sent of the tensor, flat.

    `parts` are, for each rank, the flat pieces of whose mean it makes. The pieces of a tensor, in the order of ranks, are
    the whole tensor, so residuals do not depend on how tensors are cut.
    """

    def __init__(self) -> None:
        self.residuals: dict[Any, Tensor] = {}

    def added_to(self, parts: Sequence[Tensors]) -> list[Tensor]:
        """Return what is to be sent for each part: its pieces plus their residuals, fused in a new tensor.

        Raises ArithmeticError if a piece has nan or inf.
        """
        wanted: list[Tensor] = []
        used: Counter[Any] = Counter()
        nothing = widened(next(x for part in parts for x in part.values())[:0])
        for part in parts:
            x = fused(part) if part else nothing
            require_finite(x, "a gradient")
            for key, piece in cut(x, part).items():
                start, used[key] = used[key], used[key] + piece.numel()
                if key in self.residuals:
                    piece += self.residuals[key][start : used[key]]
            wanted.append(x)
        return wanted

    def keep(self, parts: Sequence[Tensors], left: Sequence[Tensor]) -> None:
        """Keep for each part what was not sent of it."""
        pieces: dict[Any, list[Tensor]] = {}
        for part, own in zip(parts, left):
            for key, x in cut(own, part).items():
                pieces.setdefault(key, []).append(x)
        self.residuals |= {key: own[0] if len(own) == 1 else torch.cat(own) for key, own in pieces.items()}

    def state(self) -> State:
        return {key: {"residual": x} for key, x in self.residuals.items()}
