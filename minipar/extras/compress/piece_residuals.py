"""The residuals of `scattered_means`, which sends to each rank the pieces of tensors whose mean that rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.extras.compress.plain_mean import State, Tensors, cut, fused

Group = tuple[Any, ...]  # the keys of tensors that are reduced together


class PieceResiduals:
    """`residuals[group, r]` is the residual of the pieces for rank r, fused into one vector.

    A checkpoint has residuals by tensor: the pieces of a tensor, in the order of ranks, are the whole tensor.
    """

    def __init__(self, residuals: dict[Any, Tensor]):
        self.residuals = residuals
        self._shapes: dict[Group, list[Tensors]] = {}  # meta tensors of each rank's pieces

    def begin(self, parts: Sequence[Tensors], loaded: State) -> Group:
        """Return the group of these pieces. The first time, take its residuals out of `loaded`.

        A loaded "residual_of_mean" is added to every rank's residual, since the mean is not encoded here.
        """
        group = tuple(tuple(part) for part in parts)
        if group in self._shapes:
            return group
        self._shapes[group] = [
            {key: torch.empty_like(x, device="meta") for key, x in part.items()} for part in parts
        ]
        keys = dict.fromkeys(key for part in parts for key in part)
        found = {key: loaded.pop(key) for key in keys if key in loaded}
        left = {key: torch.stack(list(state.values())).sum(0).flatten() for key, state in found.items()}
        used = dict.fromkeys(left, 0)
        for r, part in enumerate(parts):
            residuals = {key: torch.zeros_like(x) for key, x in part.items()}
            for key, x in part.items():
                if key in left:
                    residuals[key] = left[key][used[key] : used[key] + len(x)]
                    used[key] += len(x)
            if left and part:
                self.residuals[group, r] = fused(residuals)
        return group

    def add_to(self, found: State) -> None:
        """Add each tensor's "residual" to a compressor's state."""
        for group, parts in self._shapes.items():
            pieces: dict[Any, list[Tensor]] = {}
            for r, shapes in enumerate(parts):
                if (group, r) in self.residuals:
                    for key, part in cut(self.residuals[group, r], shapes).items():
                        pieces.setdefault(key, []).append(part)
            for key, own in pieces.items():
                found.setdefault(key, {})["residual"] = torch.cat(own).view(key.shape)
