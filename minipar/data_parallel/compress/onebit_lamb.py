"""1-bit LAMB: LAMB until its scales have settled, then momentum by signs, and scales that follow the variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.data_parallel.compress.momentum_optimizer import MomentumOptimizer

COEFFICIENT = (0.01, 10.0)  # limits of a layer's scale in its average
RATIO, RATIO_CHANGE = (0.5, 4.0), 0.1  # limits of r, and of its change in a step


class OneBitLamb(MomentumOptimizer):
    """LAMB that reduces gradients itself; after `warmup` steps it sends one bit per element.

    warm-up   LAMB's step, c = |w| / |u| of each layer;   c_avg = b3 c_avg + (1 - b3) c
              at its end v is frozen, and a copy v' goes on
    then      m = b1 m + (1 - b1) g, with this rank's own g
              m = compressed mean of m over all layers at once, error feedback on both sides
              g' = (m - b1 m before) / (1 - b1);   v' = b2 v' + (1 - b2) g'^2
              r = largest of sqrt(v) / sqrt(v'), within 10 % of the r before and within [0.5, 4]
              w = w - lr r c_avg (m / sqrt(v) + weight_decay w)

    Norms of compressed momenta say little, so a layer's scale is that of the warm-up, c_avg, and follows the variance by r.
    One vector holds all layers, and one scale must do for it: so each layer's momentum is multiplied before, and divided
    after, by what makes their sizes equal at the end of the warm-up: the mean of their root mean squares over its own.
    Where v is zero, so is m, as in 1-bit Adam. With weight decay, r counts by the part of u that is not decay.
    Sends 2(p-1)/p * 4 bytes an element in the warm-up, then 2(p-1)/p / 8 bytes and scales. State: 12 bytes per parameter,
    and residuals. Needs whole layers on each rank.
    Raises ValueError for warmup below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:2104.06069, algorithm 1, as DeepSpeed's OnebitLamb runs it: its order, its limits, r under weight decay.
    Ours: bias corrections as in LAMB, those of the warm-up's last step after it; c limited in c_avg alone, and not in the
    step, so that the warm-up is LAMB; 1 where c_avg was never set, and DeepSpeed's 0 stops the layer; m = 0 where
    v = 0, for which DeepSpeed takes a mask from the caller.
    """

    def __init__(
        self, params, comm, warmup: int = 100, lr: float = 1e-3, betas=(0.9, 0.999, 0.9), eps: float = 1e-6,
        weight_decay: float = 0.0, **options,
    ):  # fmt: skip
        if warmup < 1:
            raise ValueError(f"warmup={warmup}; use at least 1 step of LAMB, in which its scales settle")
        betas = (*betas, 0.9)[:3]
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, comm, defaults, warmup, **options)

    def _new_state(self, param: Tensor) -> dict:
        numbers = {"c_avg": torch.tensor(0.0), "ratio": torch.tensor(1.0), "equal": torch.tensor(1.0)}
        return {**super()._new_state(param), "fresh": torch.zeros_like(param), **numbers}

    def _step(self, pairs: list, grads: dict, warm: bool) -> None:
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

    def _lamb(self, group: dict, param: Tensor, grad: Tensor) -> Tensor:
        """LAMB's u, in the order of data_parallel/lamb.py's operations."""
        (b1, b2, _), state = group["betas"], self.state[param]
        m, v, t = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        return (m / (1 - b1**t)).div_(denominator).add_(param, alpha=group["weight_decay"])

    def _apply_lamb(self, group: dict, param: Tensor, update: Tensor, w: float, u: float) -> None:
        """LAMB's step with squared norms w and u."""
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

    def _follow(self, group: dict, param: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """From a layer's averaged momentum, g' and v': (u, largest sqrt(v) / sqrt(v'), |u|^2, |u without decay|^2)."""
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
        self, group: dict, param: Tensor, update: Tensor, ratio: float, whole: float, undecayed: float
    ) -> None:
        """The step of a layer: r and w."""
        state = self.state[param]
        if group["weight_decay"] and whole > 0:
            share = min(1.0, (undecayed / whole) ** 0.5)
            ratio = ratio * share + 1 - share
        last = state["ratio"].item()
        ratio = _within(_within(ratio, *RATIO), last * (1 - RATIO_CHANGE), last * (1 + RATIO_CHANGE))
        state["ratio"].fill_(ratio)
        param.sub_(update, alpha=group["lr"] * ratio * (state["c_avg"].item() or 1.0))


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()  # as in tensor_lists.squared_norms


def _read(rows: list[Sequence[Tensor]]) -> list[list[float]]:
    """The numbers of all layers, read at once: a step waits for a GPU once."""
    return torch.stack([torch.stack(row) for row in rows]).tolist() if rows else []


def _within(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
