"""0/1 Adam: a variance that freezes by degrees, one bit per element, and steps that send nothing at all."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.data_parallel.compress.momentum_optimizer import MomentumOptimizer
from minipar.errors import divisors, require_positive


class ZeroOneAdam(MomentumOptimizer):
    """Adam whose ranks walk alone between agreements, and agree by signs on how far they went.

    each step            m = b1 m + (1 - b1) g, with this rank's own g
                         w = w - lr m / (sqrt(v) + eps);   u = u + lr m
    at an agreement      u = compressed mean of u
                         m = u / sum of lr since the last agreement
                         w = w at the last agreement - u / (sqrt(v) + eps)
                         u = 0
    at a variance step   v = b2 v + (1 - b2) (plain mean of g)^2

    Variance steps, the paper's T_v: within the first `warmup` steps, the gaps between them double after every `patience`
    (its kappa, 16): adaptive freezing. Agreements, T_u: every step of the warm-up, then after steps whose number is a
    multiple of a gap, which grows through the divisors of `every`, each for HOLD agreements.
    No bias correction. Weight decay is decoupled: it shrinks w, also that at the last agreement. Where v is zero, so is m,
    as in 1-bit Adam.
    Sends in a variance step 2(p-1)/p * 4 bytes an element, in an agreement 2(p-1)/p / 8 bytes and scales, else nothing.
    State: 8 bytes per parameter, residuals of 4 + 4/p, and 8 more for u and w at the last agreement.
    Raises ValueError for warmup, every or patience below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:2202.06009, algorithm 1, and DeepSpeed's ZeroOneAdam. The algorithm updates v last in a step; here, as
    in DeepSpeed, that comes first, since v starts at 0. In the warm-up DeepSpeed averages gradients, by signs between
    variance steps; here u goes by signs in every step, as in the algorithm. Ours: T_u, whose gaps there double up to 16,
    on a schedule fitted to the learning rate's; here they grow right after the warm-up, in runs of any length, and divide
    `every`, so that a run may end at any multiple of it. Decay of w beside u, where DeepSpeed's is part of u. A sign's
    scale (see codecs.py).
    """

    HOLD = 4  # agreements before the gap grows

    def __init__(
        self, params, comm, warmup: int = 100, every: int = 16, patience: int = 16, lr: float = 1e-3,
        betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, **options,
    ):  # fmt: skip
        require_positive(warmup=warmup, every=every, patience=patience)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, comm, defaults, warmup, **{**options, "reduces_warmup": False})
        self.every, self.patience = every, patience
        self._alone: dict[
            Tensor, dict
        ] = {}  # since the last agreement: w then, u, sum of lr, shrinkage by decay

    def _step(self, pairs: list, grads: dict, warm: bool) -> None:
        step = self.num_steps
        if is_variance_step(step, self.warmup, self.patience):
            self._update_variance(pairs, self.plain.means(grads))
        for group, param in pairs:
            self._walk(group, param, grads[param])
        if agrees_after(step, self.warmup, self.every):
            means = self.compressors.means({p: self._alone[p]["u"] for _, p in pairs})
            for group, param in pairs:
                self._agree(group, param, means[param])

    def _update_variance(self, pairs: list, grads: dict) -> None:
        for group, param in pairs:
            b2, grad = group["betas"][1], grads[param]
            self.state[param]["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)

    def _walk(self, group: dict, param: Tensor, grad: Tensor) -> None:
        state, lr = self.state[param], group["lr"]
        if param not in self._alone:
            new = {"start": param.detach().clone(), "u": torch.zeros_like(param), "lr": 0.0, "shrink": 1.0}
            self._alone[param] = new
        alone, kept = self._alone[param], 1 - lr * group["weight_decay"]
        m = state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        m.mul_(state["exp_avg_sq"] > 0)  # no gradient was ever seen there, and a sign cannot say zero
        param.mul_(kept).addcdiv_(m, state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)
        alone["u"].add_(m, alpha=lr)
        alone["lr"], alone["shrink"] = alone["lr"] + lr, alone["shrink"] * kept

    def _agree(self, group: dict, param: Tensor, u: Tensor) -> None:
        state, alone = self.state[param], self._alone.pop(param)
        u = u * (state["exp_avg_sq"] > 0)
        state["exp_avg"].copy_(u / alone["lr"] if alone["lr"] else u)
        w = alone["start"].mul_(alone["shrink"])
        param.copy_(w.addcdiv_(u, state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-1))


def is_variance_step(step: int, warmup: int, patience: int) -> bool:
    """Whether the variance is updated in this step, the first being 1: gaps of 1, 2, 4 ..., each `patience` times."""
    at, gap = 0, 1
    while step <= warmup:
        if step <= at + patience * gap:
            return (step - at) % gap == 0
        at, gap = at + patience * gap, 2 * gap
    return False


def agrees_after(step: int, warmup: int, every: int) -> bool:
    """Whether the ranks agree after this step, the first being 1; always where `every` divides it."""
    at = warmup
    for gap in divisors(every):
        if step <= at + ZeroOneAdam.HOLD * gap or gap == every:
            return step <= warmup or step % gap == 0
        at += ZeroOneAdam.HOLD * gap
    return False
