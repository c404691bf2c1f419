"""Optimizer arithmetic for all parameters at once: one operation on a list of tensors is one kernel on a GPU.

All tensors of a list must have the same dtype and device. Lists in the same operation must have equal shapes at equal
indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.data_parallel.arguments import ParamGroup
from minipar.support.staging import to_device

ROW_ELEMS = 256  # elements per row of `Rows`


def trained_lists(param_groups: list[ParamGroup]) -> Iterator[tuple[ParamGroup, list[Tensor]]]:
    """Yield (group, its parameters with a gradient), one list for each dtype and device."""
    for group in param_groups:
        lists: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                lists.setdefault((param.dtype, param.device), []).append(param)
        yield from ((group, params) for params in lists.values())


class Moments(NamedTuple):
    """Adam's moments for several parameters: m, the denominator sqrt(v') + eps, and 1 - b1^t, which corrects m."""

    means: list[Tensor]
    denominators: list[Tensor]
    corrections: list[float]


def update_moments(
    group: ParamGroup, params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]
) -> Moments:
    """Update Adam's moments.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   m' = m / (1 - b1^t);   v' = v / (1 - b2^t)

    The step count t is on the CPU, as in torch's optimizers. The denominators are new tensors.
    """
    states, (b1, b2) = [state[param] for param in params], group["betas"]
    for param, own in zip(params, states):
        if not own:
            own["step"] = torch.tensor(0.0)
            own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    steps, means, squares = ([own[key] for own in states] for key in ("step", "exp_avg", "exp_avg_sq"))
    torch._foreach_add_(steps, 1)
    counts, grads = (
        torch.stack(steps).tolist(),
        [grad for param in params if (grad := param.grad) is not None],
    )
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    denominators = list(torch._foreach_div(squares, [1 - b2**t for t in counts]))
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, group["eps"])
    return Moments(means, denominators, [1 - b1**t for t in counts])


class Rows:
    """Memory for tensors shaped like `params`. Each starts at a new row, so each can be multiplied by its own factor.

    parts   views of the memory, one per parameter and in its shape
    layout  the device, and the number of rows of each tensor

    Factors on a GPU need this: torch's operations on lists take one factor for all tensors, or factors on the host.
    """

    def __init__(self, params: list[Tensor]):
        lengths = [-(-param.numel() // ROW_ELEMS) for param in params]
        self._whole = params[0].new_empty(sum(lengths), ROW_ELEMS)
        pieces = torch.split(self._whole, lengths)
        self.parts = [x.flatten()[: p.numel()].view(p.shape) for x, p in zip(pieces, params)]
        self.layout = self._whole.device, tuple(lengths)

    def owners(self) -> Tensor:
        """Return, for each row, the index of the tensor that it belongs to, on the tensors' device."""
        device, lengths = self.layout
        return to_device(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int(), device)

    def scale(self, factors: Tensor, owners: Tensor) -> None:
        """Multiply part i by factors[i]."""
        self._whole.mul_(factors.to(self._whole.dtype).index_select(0, owners)[:, None])
