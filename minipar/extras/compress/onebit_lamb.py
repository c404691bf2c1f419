"""1-bit LAMB: LAMB until its layers' scales settle, then averages of the momentum, sent as signs."""

from __future__ import annotations

from collections.abc import Iterable
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
        numbers = {"c_avg": torch.tensor(0.0), "ratio": torch.tensor(1.0), "equal": torch.tensor(1.0)}
        return {**super()._new_state(param), "fresh": torch.zeros_like(param), **numbers}

    def _step(self, pairs: Pairs, grads: Tensors, warm: bool) -> None:
        if warm:
            updates = [self._lamb(group, param, grads[param]) for group, param in pairs]
            norms = _read([(_square(param), _square(update)) for (_, param), update in zip(pairs, updates)])
            for (group, param), update, (w, u) in zip(pairs, updates, norms):
                self._apply_lamb(group, param, update, w, u)
            if self.num_steps == self.warmup:
                self._freeze([param for _, param in pairs])
            return
        before = {p: self.state[p]["exp_avg"].clone() for _, p in pairs}
        scaled = {}
        for group, param in pairs:
            state = self.state[param]
            scaled[param] = state["exp_avg"].lerp(grads[param], 1 - group["betas"][0]) * float(state["equal"])
        for param, m in self.compressors.means(scaled).items():
            state = self.state[param]
            state["exp_avg"].copy_((m / float(state["equal"])).mul_(state["exp_avg_sq"] > 0))
        directions = [self._follow(group, param, before[param]) for group, param in pairs]
        numbers = _read([numbers for _, *numbers in directions])
        for (group, param), (update, *_), own in zip(pairs, directions, numbers):
            self._apply(group, param, update, *own)

    def _lamb(self, group: ParamGroup, param: Tensor, grad: Tensor) -> Tensor:
        """Return LAMB's update u, by the same operations in the same order as in minipar.extras.optimizers.lamb."""
        (b1, b2, _), state = group["betas"], self.state[param]
        m, v, t = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        direction: Tensor = (m / (1 - b1**t)).div_(denominator)
        return direction.add_(param, alpha=group["weight_decay"])

    def _apply_lamb(self, group: ParamGroup, param: Tensor, update: Tensor, w: float, u: float) -> None:
        """Update param as LAMB does; w and u are the squared norms of the weights and of the update."""
        (_, _, b3), state = group["betas"], self.state[param]
        c = (w / u) ** 0.5 if w > 0 and u > 0 else 1.0
        if c != 1.0:
            state["c_avg"].mul_(b3).add_((1 - b3) * _within(c, *COEFFICIENT))
        param.sub_(update * (group["lr"] * c))

    def _freeze(self, params: list[Tensor]) -> None:
        sizes = {p: self.state[p]["exp_avg"].square().mean().sqrt().item() for p in params}
        mean = sum(sizes.values()) / len(sizes)
        for param, size in sizes.items():
            self.state[param]["equal"].fill_(mean / size if size > 0 else 1.0)
            self.state[param]["fresh"].copy_(self.state[param]["exp_avg_sq"])

    def _follow(self, group: ParamGroup, param: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """Update v' of a layer. Return (u, largest sqrt(v) / sqrt(v'), |u|^2, |u without decay|^2)."""
        (b1, b2, _), state = group["betas"], self.state[param]
        grad = (state["exp_avg"] - b1 * before) / (1 - b1)
        state["fresh"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        correct_m, correct_v = 1 - b1**self.warmup, 1 - b2**self.warmup
        frozen = (state["exp_avg_sq"] / correct_v).sqrt_().add_(group["eps"])
        fresh = (state["fresh"] / correct_v).sqrt_().add_(group["eps"])
        adam = state["exp_avg"] / correct_m / frozen
        update = adam + group["weight_decay"] * param
        return update, (frozen / fresh).max().double(), _square(update), _square(adam)

    def _apply(
        self, group: ParamGroup, param: Tensor, update: Tensor, ratio: float, whole: float, undecayed: float
    ) -> None:
        """Update r and w of a layer. `ratio` is the new r before its limits; `whole` and `undecayed` are squared norms."""
        state = self.state[param]
        if group["weight_decay"] and whole > 0:
            share = min(1.0, (undecayed / whole) ** 0.5)
            ratio = ratio * share + 1 - share
        last = state["ratio"].item()
        ratio = _within(_within(ratio, *RATIO), last * (1 - RATIO_CHANGE), last * (1 + RATIO_CHANGE))
        state["ratio"].fill_(ratio)
        param.sub_(update, alpha=group["lr"] * ratio * (state["c_avg"].item() or 1.0))


def _square(x: Tensor) -> Tensor:
    # In float64, as in train.optim.squared_norms.
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _read(rows: Iterable[Iterable[Tensor]]) -> list[list[float]]:
    """Copy the values of all layers to the host at once, so that a step waits for the GPU only once."""
    stacked = [torch.stack(list(row)) for row in rows]
    return torch.stack(stacked).tolist() if stacked else []


def _within(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
