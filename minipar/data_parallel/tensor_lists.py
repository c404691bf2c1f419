"""Steps of optimizers for all parameters at once: one operation on a list of tensors is one kernel on a GPU.

That holds where a list has one dtype and one device, and the tensors of one place in several lists have one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.staging import to_device

ROW_ELEMS = 256


def trained_lists(param_groups: list[dict]) -> Iterator[tuple[dict, list[Tensor]]]:
    """Yield (group, its parameters with a gradient), one list for each dtype and device."""
    for group in param_groups:
        lists: dict[tuple, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                lists.setdefault((param.dtype, param.device), []).append(param)
        yield from ((group, params) for params in lists.values())


class Moments(NamedTuple):
    """Adam's moments of several parameters: m, sqrt(v') + eps with v' bias-corrected, and what corrects each m."""

    means: list[Tensor]
    denominators: list[Tensor]
    corrections: list[float]


def update_moments(group: dict, params: list[Tensor], state: Mapping[Tensor, dict]) -> Moments:
    """m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2;   m' = m / (1 - b1^t);   v' = v / (1 - b2^t)

    The count of steps t is on the CPU, as that of torch's optimizers. The denominators are new tensors.
    """
    states, (b1, b2) = [state[param] for param in params], group["betas"]
    for param, own in zip(params, states):
        if not own:
            own["step"] = torch.tensor(0.0)
            own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    steps, means, squares = ([own[key] for own in states] for key in ("step", "exp_avg", "exp_avg_sq"))
    torch._foreach_add_(steps, 1)
    counts, grads = torch.stack(steps).tolist(), [param.grad for param in params]
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    denominators = torch._foreach_div(squares, [1 - b2**t for t in counts])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, group["eps"])
    return Moments(means, denominators, [1 - b1**t for t in counts])


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """The squared norms [n], in float64: how a tensor was cut then changes the rounding only."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    plain = [
        x.as_subclass(Tensor) for x in tensors
    ]  # a ShardGradient has no norm: it is not the whole gradient
    return torch.stack(torch._foreach_norm(plain, 2, torch.float64)).square()


class Rows:
    """Room for tensors of the shapes of `params`, each from the start of a row on, so that each can get its own factor.

    parts   views of the room, one in the shape of each tensor
    layout  what decides to which tensor each row belongs

    Factors that are on a GPU take this: an operation on lists has one factor for all, or factors of the host.
    """

    def __init__(self, params: list[Tensor]):
        lengths = [-(-param.numel() // ROW_ELEMS) for param in params]
        self._whole = params[0].new_empty(sum(lengths), ROW_ELEMS)
        pieces = self._whole.split(lengths)
        self.parts = [x.flatten()[: p.numel()].view(p.shape) for x, p in zip(pieces, params)]
        self.layout = (self._whole.device, *lengths)

    def owners(self) -> Tensor:
        """Return the number of each row's tensor, on their device."""
        device, *lengths = self.layout
        return to_device(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int(), device)

    def scale(self, factors: Tensor, owners: Tensor) -> None:
        """Multiply part i by factors[i]."""
        self._whole.mul_(factors.to(self._whole.dtype).index_select(0, owners)[:, None])
