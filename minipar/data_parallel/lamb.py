"""LAMB, an optimizer that needs norms of whole parameters: these are all-reduced where each rank has a shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam with each parameter's step rescaled to the norm of the parameter.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    u = m' / (sqrt(v') + eps) + weight_decay w         m', v' with bias correction
    w = w - lr |w| / |u| u                             the ratio is 1 where either norm is 0

    The two norms are of the whole parameter. Where a rank has a shard of it, `comm` is the ranks with the other shards:
    the squares are summed over them in one all-reduce per step, of 16 bytes (two float64) per parameter. Without that
    sum, the result would depend on the number of ranks.
    Source: arXiv:1904.00962, algorithm 2.
    """

    sums_over_shards = True  # ZeroOptimizer passes `comm` to a class with this attribute

    def __init__(
        self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-6, weight_decay=0.0, comm=None
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._comm = comm

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        updates = [self._update(group, param) for group, param in with_gradient]
        ratios = self._ratios([param for _, param in with_gradient], updates)
        for (group, param), update, ratio in zip(with_gradient, updates, ratios):
            param.sub_(update * (ratio * group["lr"]))
        return loss

    def _update(self, group: dict, param: Tensor) -> Tensor:
        state, (b1, b2) = self.state[param], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        t, m, v = state["step"].item(), state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(param.grad, 1 - b1)
        v.mul_(b2).addcmul_(param.grad, param.grad, value=1 - b2)
        denominator = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        return (m / (1 - b1**t)).div_(denominator).add_(param, alpha=group["weight_decay"])

    def _ratios(self, params: list[Tensor], updates: list[Tensor]) -> Sequence[Tensor]:
        if not params:
            return ()
        squares = torch.stack([torch.stack((_square(w), _square(u))) for w, u in zip(params, updates)])
        if self._comm is not None and self._comm.size > 1:
            squares = self._comm.all_reduce(squares.to(self._comm.device)).to(params[0].device)
        return trust_ratios(squares)


def trust_ratios(squares: Tensor) -> Sequence[Tensor]:
    """Return |w| / |u| of each pair of squared norms [n, 2], 1 where either is 0: as tensors, for no GPU to be awaited."""
    of_param, of_update = squares.unbind(1)
    return torch.where(squares.amin(1) > 0, (of_param / of_update).sqrt(), 1.0).unbind()


def _square(x: Tensor) -> Tensor:
    return x.double().square().sum()
