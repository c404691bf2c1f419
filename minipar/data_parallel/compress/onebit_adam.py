"""1-bit Adam: Adam until its variance has settled, then momentum by signs."""

from __future__ import annotations

from torch import Tensor

from minipar.data_parallel.compress.momentum_optimizer import MomentumOptimizer


class OneBitAdam(MomentumOptimizer):
    """AdamW that reduces gradients itself; after `warmup` steps it sends one bit per element.

    warm-up   g = mean over ranks of the gradient; AdamW's step
    then      m = b1 m + (1 - b1) g, with this rank's own g
              m = compressed mean of m, with error feedback on both sides
              w = w - lr' m / (sqrt(v) + eps), with v as it was at the end of the warm-up

    Signs of a gradient would be useless to Adam, whose variance is not linear in it: with v frozen the update is linear in
    m, so error feedback works. Where v is zero no gradient was seen, rows of words that do not occur, say: a sign cannot
    say zero, so m is set to it there. A weight whose first gradient comes after the warm-up therefore stays as it is.
    Sends 2(p-1)/p * 4 bytes an element in the warm-up, then 2(p-1)/p / 8 bytes and scales. State: 8 bytes per parameter,
    and residuals of 4 + 4/p. Nothing else may reduce gradients, but see `reduces_warmup`.
    Raises ValueError for warmup below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:2102.02888, algorithm 1, after its authors' equations (DeepSpeed's post "1-bit Adam", section 2.1) and
    DeepSpeed's OnebitAdam. Ours: Adam's bias corrections, which DeepSpeed leaves out (after the warm-up those of its last
    step, in lr' and eps, so that no step jumps); m = 0 where v = 0, for which DeepSpeed takes a mask from the caller;
    decay of w as in AdamW; a sign's scale (see codecs.py).
    """

    def __init__(
        self, params, comm, warmup: int = 100, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **options,
    ):  # fmt: skip
        if warmup < 1:
            raise ValueError(f"warmup={warmup}; use at least 1 step of Adam, in which the variance settles")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, comm, defaults, warmup, **options)

    def _step(self, pairs: list, grads: dict, warm: bool) -> None:
        for group, param in pairs:
            (b1, b2), state, grad = group["betas"], self.state[param], grads[param]
            state["exp_avg"].lerp_(grad, 1 - b1)
            if warm:
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        if not warm:
            means = self.compressors.means({p: self.state[p]["exp_avg"] for _, p in pairs})
            for param, m in means.items():
                state = self.state[param]
                state["exp_avg"].copy_(m.mul_(state["exp_avg_sq"] > 0))
        step = min(self.num_steps, self.warmup)
        for group, param in pairs:
            adamw_update(group, param, self.state[param]["exp_avg"], self.state[param]["exp_avg_sq"], step)


def adamw_update(group: dict, param: Tensor, m: Tensor, v: Tensor, step: int) -> None:
    """AdamW's update, in the order of torch's own operations."""
    b1, b2 = group["betas"]
    param.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (v.sqrt() / (1 - b2**step) ** 0.5).add_(group["eps"])
    param.addcdiv_(m, denominator, value=-group["lr"] / (1 - b1**step))
