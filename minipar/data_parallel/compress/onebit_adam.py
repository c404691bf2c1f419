"""1-bit Adam: Adam until its variance has settled, then momentum by signs."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.data_parallel.compress.all_reduce import CompressedMean
from minipar.data_parallel.compress.codecs import Sign


class OneBitAdam(torch.optim.Optimizer):
    """Adam that reduces gradients itself; after `warmup` steps it sends one bit per element.

    warm-up   g = mean over ranks of the gradient; Adam's step                        all-reduce: 2(p-1)/p * 4 bytes
    then      m = b1 m + (1 - b1) g, with this rank's own g; m = compressed mean of m  2(p-1)/p / 8 bytes, and scales
              w = w - lr' m / (sqrt(v) + eps), with v as it was at the end of the warm-up

    Signs of a gradient would be useless to Adam, whose variance is not linear in it: with v frozen the update is linear in
    m, so error feedback works. lr' and eps include the bias corrections of the warm-up's last step. The model's replicas
    must be alike, and nothing else may reduce gradients (no DDP). State: 8 bytes per parameter, and residuals of 4 + 4/p.
    Raises ValueError for warmup below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:2102.02888, algorithm 1.
    """

    def __init__(
        self, params, comm, warmup: int = 100, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8,
        error_feedback: bool = True,
    ):  # fmt: skip
        if warmup < 1:
            raise ValueError(f"warmup={warmup}; use at least 1 step of Adam, in which the variance settles")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.comm, self.warmup, self.num_steps = comm, warmup, 0
        self.mean = CompressedMean(comm, Sign(), error_feedback)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for i, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            flat = torch.cat([p.grad.flatten().float() for p in params])
            warm = self.num_steps <= self.warmup
            m, v = self._warm(group, flat) if warm else self._compressed(i, group, flat)
            self._update(group, params, m, v, min(self.num_steps, self.warmup))
        return loss

    def _state(self, group: dict, like: Tensor) -> dict:
        return self.state.setdefault(
            group["params"][0], {"m": torch.zeros_like(like), "v": torch.zeros_like(like)}
        )

    def _warm(self, group: dict, grad: Tensor) -> tuple[Tensor, Tensor]:
        (b1, b2), state = group["betas"], self._state(group, grad)
        grad = self.comm.all_reduce(grad, "mean")
        state["m"].lerp_(grad, 1 - b1)
        state["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        return state["m"], state["v"]

    def _compressed(self, key: int, group: dict, grad: Tensor) -> tuple[Tensor, Tensor]:
        (b1, _), state = group["betas"], self._state(group, grad)
        state["m"].copy_(self.mean(state["m"].lerp(grad, 1 - b1), key))
        return state["m"], state["v"]

    @staticmethod
    def _update(group: dict, params: list, m: Tensor, v: Tensor, step: int) -> None:
        """Adam's update, in the order of torch's own operations."""
        b1, b2 = group["betas"]
        denominator = (v.sqrt() / (1 - b2**step) ** 0.5).add_(group["eps"])
        sizes = [p.numel() for p in params]
        for param, a, b in zip(params, m.split(sizes), denominator.split(sizes)):
            change = torch.addcdiv(
                param.float(), a.view_as(param), b.view_as(param), value=-group["lr"] / (1 - b1**step)
            )
            param.copy_(change)
