"""1-bit LAMB: LAMB until its layers' scales settle, then averages of the momentum, sent as signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.comm import Comm
from minipar.data_parallel.arguments import CommOf, ParamGroup
from minipar.extras.compress.momentum_optimizer import MomentumOptimizer, Pairs
from minipar.extras.compress.plain_mean import Tensors

COEFFICIENT = (0.01, 10.0)  # limits of a layer's scale c when it enters c_avg
RATIO, RATIO_CHANGE = (0.5, 4.0), 0.1  # limits of r, and of its change in a step


class OneBitLamb(MomentumOptimizer):
    """LAMB that averages over ranks itself: gradients in the first `warmup` steps, then momenta, at one bit per element.

    warm-up   LAMB's step, with c = |w| / |u| of each layer;   c_avg = b3 c_avg + (1 - b3) c
              at its end v is frozen, and a copy v' continues to be updated
    then      m = b1 m + (1 - b1) g, with this rank's own g
              m = compressed mean of m over all layers at once, with error feedback in both phases
              g' = (m - b1 * previous m) / (1 - b1);   v' = b2 v' + (1 - b2) g'^2
              r = the largest element of sqrt(v) / sqrt(v'), kept within 10 % of the previous r and within [0.5, 4]
              w = w - lr r c_avg (m / sqrt(v) + weight_decay w)

    The norm of a compressed momentum is unreliable, so a layer's scale is the warm-up's c_avg times r, which follows the
    variance. All layers are sent as one vector with one scale for the signs. So before sending, each layer's momentum is
    brought to the same size: it is multiplied by (mean of all layers' root mean squares) / (its own), measured at the end
    of the warm-up, and divided by this factor afterwards. Where v is zero, m is set to zero, as in 1-bit Adam. With weight
    decay, r scales only the part of u that is not decay.
    Sends 2(p-1)/p * 4 bytes per element in the warm-up, then 2(p-1)/p / 8 bytes and scales. State: 12 bytes per parameter,
    and residuals. Needs unsharded layers on each rank.
    Source: arXiv:2104.06069, algorithm 1. From DeepSpeed's OnebitLamb: the order of the updates, the limits of c and r, and
    how weight decay enters r. Differences from DeepSpeed: this optimizer has LAMB's bias corrections, which keep the values
    of the last warm-up step. It limits c only in c_avg, not in the step, so that the warm-up is exactly LAMB. A c_avg that
    was never set counts as 1 (DeepSpeed's 0 would freeze the layer). It sets m = 0 where v = 0, for which DeepSpeed takes a
    mask from the caller.
    """

    def __init__(
        self, params: ParamsT, comm: Comm | CommOf, warmup: int = 100, *,
        betas: tuple[float, ...] = (0.9, 0.999, 0.9), eps: float = 1e-6, **options: Any,
    ):  # fmt: skip
        super().__init__(params, comm, warmup, betas=(*betas, 0.9)[:3], eps=eps, **options)

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        wide = torch.promote_types(param.dtype, torch.float32)
        start = {"c_avg": 0.0, "ratio": 1.0, "equal": 1.0}
        numbers = {name: param.new_tensor(x, dtype=wide) for name, x in start.items()}
        return {**super()._new_state(param), "fresh": torch.zeros_like(param), **numbers}

    def _step(self, pairs: Pairs, grads: Tensors, warm: bool) -> None:
        if warm:
            for group, param in pairs:
                self._lamb(group, param, grads[param])
            if self.num_steps == self.warmup:
                self._freeze([param for _, param in pairs])
            return
        before = {p: self.state[p]["exp_avg"].clone() for _, p in pairs}
        scaled = {}
        for group, param in pairs:
            state = self.state[param]
            scaled[param] = state["exp_avg"].lerp(grads[param], 1 - group["betas"][0]) * state["equal"]
        for param, m in self.compressors.means(scaled).items():
            state = self.state[param]
            state["exp_avg"].copy_((m / state["equal"]).mul_(state["exp_avg_sq"] > 0))
        for group, param in pairs:
            self._follow(group, param, before[param])

    def _lamb(self, group: ParamGroup, param: Tensor, grad: Tensor) -> None:
        """Take LAMB's step, by the same operations in the same order as in minipar.extras.optimizers.lamb."""
        (b1, b2, b3), state = group["betas"], self.state[param]
        m, v, t = state["exp_avg"], state["exp_avg_sq"], self.num_steps
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        update = (m / (1 - b1**t)).div_(denominator).add_(param, alpha=group["weight_decay"])
        w, u = _square(param), _square(update)
        is_known = (w > 0) & (u > 0)
        c = torch.where(is_known, (w / u).sqrt(), 1.0)
        c_avg = b3 * state["c_avg"] + (1 - b3) * c.clamp(*COEFFICIENT)
        state["c_avg"].copy_(torch.where(is_known, c_avg, state["c_avg"]))
        param.sub_(update * (group["lr"] * c))

    def _freeze(self, params: list[Tensor]) -> None:
        sizes = torch.stack([self.state[p]["exp_avg"].square().mean().sqrt() for p in params])
        for param, equal in zip(params, torch.where(sizes > 0, sizes.mean() / sizes, 1.0)):
            self.state[param]["equal"].copy_(equal)
            self.state[param]["fresh"].copy_(self.state[param]["exp_avg_sq"])

    def _follow(self, group: ParamGroup, param: Tensor, before: Tensor) -> None:
        """Update v' and r of a layer, and its weights."""
        (b1, b2, _), state = group["betas"], self.state[param]
        grad = (state["exp_avg"] - b1 * before) / (1 - b1)
        state["fresh"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        correct_m, correct_v = 1 - b1**self.warmup, 1 - b2**self.warmup
        frozen = (state["exp_avg_sq"] / correct_v).sqrt_().add_(group["eps"])
        fresh = (state["fresh"] / correct_v).sqrt_().add_(group["eps"])
        adam = state["exp_avg"] / correct_m / frozen
        update = adam + group["weight_decay"] * param
        ratio, whole = (frozen / fresh).max(), _square(update)
        if group["weight_decay"]:
            share = torch.where(whole > 0, (_square(adam) / whole).sqrt().clamp(max=1.0), 1.0)
            ratio = ratio * share + 1 - share
        last = state["ratio"]
        low, high = last * (1 - RATIO_CHANGE), last * (1 + RATIO_CHANGE)
        last.copy_(ratio.clamp(*RATIO).clamp(low, high))
        scale = torch.where(state["c_avg"] > 0, state["c_avg"], 1.0)
        param.sub_(update * (group["lr"] * last * scale))


def _square(x: Tensor) -> Tensor:
    # In float64, as in train.optim.squared_norms.
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()
