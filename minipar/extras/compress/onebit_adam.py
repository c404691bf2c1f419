"""1-bit Adam: Adam until its variance has settled, then averages of the momentum, sent as signs."""

from __future__ import annotations

from torch import Tensor

from minipar.data_parallel.arguments import ParamGroup
from minipar.extras.compress.momentum_optimizer import MomentumOptimizer, Pairs
from minipar.extras.compress.plain_mean import Tensors


class OneBitAdam(MomentumOptimizer):
    """AdamW that averages over ranks itself: gradients in the first `warmup` steps, then momenta, at one bit per element.

    warm-up   g = mean over ranks of the gradient; AdamW's step
    then      m = b1 m + (1 - b1) g, with this rank's own g
              m = compressed mean of m, with error feedback in both phases
              w = w - lr' m / (sqrt(v) + eps), with v frozen at the end of the warm-up

    Error feedback needs an update that is linear in the vector that is sent. Adam's update is not linear in the gradient,
    because of the variance; with v frozen it is linear in m. An element of v is zero if its gradient was zero in the whole
    warm-up, as in the embeddings of words that did not occur. There m is set to zero, because a sign cannot be zero. So a
    weight whose first gradient comes after the warm-up never changes.
    Sends 2(p-1)/p * 4 bytes per element in the warm-up, then 2(p-1)/p / 8 bytes and scales. State: 8 bytes per parameter,
    and residuals of 4 + 4/p bytes. Nothing else may reduce gradients, except in the warm-up with reduces_warmup=False.
    Source: arXiv:2102.02888, algorithm 1, with its authors' equations (DeepSpeed's post "1-bit Adam", section 2.1) and
    DeepSpeed's OnebitAdam. Differences from DeepSpeed: this optimizer has Adam's bias corrections, which keep the values of
    the last warm-up step (in lr' and eps, so that the step size does not jump). It sets m = 0 where v = 0, for which
    DeepSpeed takes a mask from the caller. It has AdamW's weight decay, and a different scale of the signs (see codecs.py).
    """

    def _step(self, pairs: Pairs, grads: Tensors, warm: bool) -> None:
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


def adamw_update(group: ParamGroup, param: Tensor, m: Tensor, v: Tensor, step: int) -> None:
    """Update param in place as torch's AdamW does, in the same order of operations."""
    b1, b2 = group["betas"]
    param.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = (v.sqrt() / (1 - b2**step) ** 0.5).add_(group["eps"])
    param.addcdiv_(m, denominator, value=-group["lr"] / (1 - b1**step))
