"""LAMB, an optimizer that needs norms of whole parameters: these are all-reduced where each rank has a shard."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.data_parallel.tensor_lists import Rows, squared_norms, trained_lists, update_moments


class Lamb(torch.optim.Optimizer):
    """Adam with each parameter's step rescaled to the norm of the parameter.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    u = m' / (sqrt(v') + eps) + weight_decay w         m', v' with bias correction
    w = w - lr |w| / |u| u                             the ratio is 1 where either norm is 0

    The two norms are of the whole parameter. Where a rank has a shard of it, `comm` is the ranks with the other shards:
    the squares are summed over them in one all-reduce per step, of 16 bytes (two float64) per parameter. Without that
    sum, the result would depend on the number of ranks.
    A step is some 25 operations on the tensors of a group and dtype: on a GPU so many kernels, however many parameters,
    and the host waits for none. It holds at most two more copies of the parameters meanwhile.
    Source: arXiv:1904.00962, algorithm 2.
    """

    sums_over_shards = True  # ZeroOptimizer passes `comm` to a class with this attribute

    def __init__(
        self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-6, weight_decay=0.0, comm=None
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._comm = comm
        self._owners: dict[tuple, Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists = list(trained_lists(self.param_groups))
        updates = [self._update(group, params) for group, params in lists]
        ratios = self._ratios(
            [param for _, params in lists for param in params], [u for rows in updates for u in rows.parts]
        )
        of_lists = ratios.split([len(params) for _, params in lists])
        self._owners = {x.layout: self._owners_of(x) for x in updates}
        for (group, params), rows, own in zip(lists, updates, of_lists):
            rows.scale(own * group["lr"], self._owners[rows.layout])
            torch._foreach_sub_(params, rows.parts)
        return loss

    def _update(self, group: dict, params: list[Tensor]) -> Rows:
        """The u of each parameter."""
        moments, rows = update_moments(group, params, self.state), Rows(params)
        torch._foreach_copy_(rows.parts, moments.means)
        torch._foreach_div_(rows.parts, moments.corrections)
        torch._foreach_div_(rows.parts, moments.denominators)
        torch._foreach_add_(rows.parts, params, alpha=group["weight_decay"])
        return rows

    def _owners_of(self, rows: Rows) -> Tensor:
        """`rows.owners()`, kept from the last step where it had such rows: so nothing is copied to a GPU."""
        known = self._owners.get(rows.layout)
        return rows.owners() if known is None else known

    def _ratios(self, params: list[Tensor], updates: list[Tensor]) -> Tensor:
        """|w| / |u| of each parameter [n]."""
        squares = squared_norms([*params, *updates]).view(2, len(params))
        if params and self._comm is not None and self._comm.size > 1:
            squares = self._comm.all_reduce(squares.to(self._comm.device)).to(squares.device)
        return trust_ratios(squares)


def trust_ratios(squares: Tensor) -> Tensor:
    """Return |w| / |u| [n] of squared norms [2, n], 1 where either is 0: a tensor, for no GPU to be awaited."""
    of_params, of_updates = squares
    return torch.where(squares.amin(0) > 0, (of_params / of_updates).sqrt(), 1.0)
