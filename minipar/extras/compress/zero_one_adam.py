"""0/1 Adam: one bit per element, steps that send nothing, and a variance that is updated less and less often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.data_parallel.arguments import CommOf, ParamGroup
from minipar.extras.compress.momentum_optimizer import MomentumOptimizer, Pairs
from minipar.extras.compress.plain_mean import Tensors
from minipar.support.errors import divisors, require_positive


@dataclass
class _Local:
    """The local steps of a parameter since the ranks last synchronised.

    start      the weights w at that time
    u          the sum of lr * m over the local steps
    shrinkage  the factor by which weight decay has shrunk the weights
    """

    start: Tensor
    u: Tensor
    sum_of_lr: float = 0.0
    shrinkage: float = 1.0


class ZeroOneAdam(MomentumOptimizer):
    """Adam with local steps. In an agreement, the ranks synchronise by averaging their accumulated updates, sent as signs.

    each step            m = b1 m + (1 - b1) g, with this rank's own g
                         w = w - lr m / (sqrt(v) + eps);   u = u + lr m
    at an agreement      u = compressed mean of u
                         m = u / sum of lr since the last agreement
                         w = w at the last agreement - u / (sqrt(v) + eps)
                         u = 0
    at a variance step   v = b2 v + (1 - b2) (plain mean of g)^2

    Variance steps (the paper's T_v) occur only within the first `warmup` steps. The gap between them doubles after every
    `patience` variance steps (the paper's kappa, 16). Agreements (T_u) occur after each step of the warm-up, then after
    steps whose number is a multiple of a gap. The gap grows through the divisors of `every`; each lasts HOLD agreements.
    There is no bias correction. Weight decay is decoupled: it shrinks w and the w of the last agreement. Where v is zero,
    m is set to zero, as in 1-bit Adam.
    Sends 2(p-1)/p * 4 bytes per element in a variance step, 2(p-1)/p / 8 bytes and scales in an agreement, else nothing.
    State: 8 bytes per parameter, residuals of 4 + 4/p bytes, and 8 more bytes for u and w at the last agreement.
    Raises ValueError for every or patience below 1.
    Source: arXiv:2202.06009, algorithm 1, and DeepSpeed's ZeroOneAdam. The algorithm updates v last in a step; here, as
    in DeepSpeed, v is updated first, since it starts at 0. In the warm-up, DeepSpeed averages gradients, as signs between
    variance steps; here u is averaged as signs in every step, as in the algorithm. The paper's gaps of T_u double up to 16,
    on a schedule that follows the learning rate's. Here they grow right after the warm-up, whatever the length of the run,
    and divide `every`, so that a run may end at any multiple of `every`. In DeepSpeed, weight decay is part of u; here it
    is not. The scale of the signs differs, too (see codecs.py).
    """

    HOLD = 4  # number of agreements before the gap grows

    def __init__(
        self, params: ParamsT, comm: Comm | CommOf, warmup: int = 100, every: int = 16, patience: int = 16, **options: Any
    ):  # fmt: skip
        require_positive(every=every, patience=patience)
        super().__init__(params, comm, warmup, **options)
        self.every, self.patience, self.reduces_warmup = every, patience, False
        self._local: dict[Tensor, _Local] = {}

    def _step(self, pairs: Pairs, grads: Tensors, warm: bool) -> None:
        step = self.num_steps
        if is_variance_step(step, self.warmup, self.patience):
            self._update_variance(pairs, self.plain.means(grads))
        for group, param in pairs:
            self._step_locally(group, param, grads[param])
        if agrees_after(step, self.warmup, self.every):
            means = self.compressors.means({p: self._local[p].u for _, p in pairs})
            for group, param in pairs:
                self._agree(group, param, means[param])

    def _update_variance(self, pairs: Pairs, grads: Tensors) -> None:
        for group, param in pairs:
            b2, grad = group["betas"][1], grads[param]
            self.state[param]["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)

    def _step_locally(self, group: ParamGroup, param: Tensor, grad: Tensor) -> None:
        state, lr = self.state[param], group["lr"]
        if param not in self._local:
            self._local[param] = _Local(param.detach().clone(), torch.zeros_like(param))
        local, kept = self._local[param], 1 - lr * group["weight_decay"]
        m = state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        m.mul_(state["exp_avg_sq"] > 0)  # zero where no gradient was seen yet, since a sign cannot be zero
        param.mul_(kept).addcdiv_(m, state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)
        local.u.add_(m, alpha=lr)
        local.sum_of_lr += lr
        local.shrinkage *= kept

    def _agree(self, group: ParamGroup, param: Tensor, u: Tensor) -> None:
        state, local = self.state[param], self._local.pop(param)
        u = u * (state["exp_avg_sq"] > 0)
        state["exp_avg"].copy_(u / local.sum_of_lr if local.sum_of_lr else u)
        w = local.start.mul_(local.shrinkage)
        param.copy_(w.addcdiv_(u, state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-1))


def is_variance_step(step: int, warmup: int, patience: int) -> bool:
    """Return whether step `step` (counted from 1) updates the variance.

    The gap between these steps is 1, then 2, then 4 ..., each `patience` times; none come after step `warmup`.
    """
    at, gap = 0, 1
    while step <= warmup:
        if step <= at + patience * gap:
            return (step - at) % gap == 0
        at, gap = at + patience * gap, 2 * gap
    return False


def agrees_after(step: int, warmup: int, every: int) -> bool:
    """Return whether the ranks synchronise after step `step` (counted from 1). They do after each multiple of `every`."""
    at = warmup
    for gap in divisors(every):
        if step <= at + ZeroOneAdam.HOLD * gap or gap == every:
            return step <= warmup or step % gap == 0
        at += ZeroOneAdam.HOLD * gap
    return False
