"""LAMB, an optimizer that needs the norms of unsharded parameters. If ranks hold shards, it all-reduces the norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.extras.optimizers.tensor_lists import Rows, trained_lists, update_moments
from minipar.mesh import require_no_part
from minipar.train.optim import squared_norms


class Lamb(torch.optim.Optimizer):
    """Adam with each parameter's step rescaled to the norm of the parameter.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    u = m' / (sqrt(v') + eps) + weight_decay w         m', v' with bias correction
    w = w - lr |w| / |u| u                             the ratio is 1 if either norm is 0

    Both norms are of the unsharded parameter. If ranks hold shards of a parameter, `comm` is the Comm of these ranks, and
    one all-reduce per step sums the squares, 16 bytes (two float64) per parameter.
    A step runs about 25 operations, each on all tensors of a group and dtype at once. On a GPU it launches that many
    kernels, however many parameters there are, and the host waits for none. A step holds at most two more copies of the
    parameters.
    Source: arXiv:1904.00962, algorithm 2.
    """

    sums_over_shards = True  # ZeroOptimizer passes `comm` to a class with this attribute

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        comm: Comm | None = None,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._comm = comm
        self._owners: dict[Any, Tensor] = {}  # the result of `owners()`, by `Rows.layout`

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists = list(trained_lists(self.param_groups))
        updates = [self._update(group, params) for group, params in lists]
        ratios = self._ratios(
            [param for _, params in lists for param in params], [u for rows in updates for u in rows.parts]
        )
        of_lists = torch.split(ratios, [len(params) for _, params in lists])
        self._owners = {x.layout: self._owners_of(x) for x in updates}
        for (group, params), rows, own in zip(lists, updates, of_lists):
            rows.scale(own * group["lr"], self._owners[rows.layout])
            torch._foreach_sub_(params, rows.parts)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> Rows:
        """Return the update u of each parameter."""
        moments, rows = update_moments(group, params, self.state), Rows(params)
        torch._foreach_copy_(rows.parts, moments.means)
        torch._foreach_div_(rows.parts, moments.corrections)
        torch._foreach_div_(rows.parts, moments.denominators)
        torch._foreach_add_(rows.parts, params, alpha=group["weight_decay"])
        return rows

    def _owners_of(self, rows: Rows) -> Tensor:
        """Return `rows.owners()`. Reuse the last step's result for the same layout, so that nothing is copied to a GPU."""
        known = self._owners.get(rows.layout)
        return rows.owners() if known is None else known

    def _ratios(self, params: list[Tensor], updates: list[Tensor]) -> Tensor:
        """Return |w| / |u| of each parameter, [n]."""
        if self._comm is None:
            require_no_part(params, "Lamb(params, comm=comm)")
        squares = squared_norms([*params, *updates]).view(2, len(params))
        if params and self._comm is not None and self._comm.size > 1:
            squares = self._comm.all_reduce(squares.to(self._comm.device)).to(squares.device)
        return trust_ratios(squares)


def trust_ratios(squares: Tensor) -> Tensor:
    """Return the tensor |w| / |u|, [n], from squared norms [2, n]; 1 if either is 0. The host does not wait for a GPU."""
    of_params, of_updates = squares
    return torch.where(squares.amin(0) > 0, (of_params / of_updates).sqrt(), 1.0)
