"""Muon: the momentum of a matrix, orthogonalized. It needs the whole matrix, so no rank may have a flat shard of it.

With ZeRO, whole matrices are given to the ranks: `whole_parameters.py`.
Source: Jordan et al., Muon, 2024 (kellerjordan.github.io/posts/muon); the scale of a step: Moonlight, arXiv:2502.16982,
section 2.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic: see newton_schulz
NEWTON_SCHULZ_STEPS = 5
ADAMW = "adamw"  # a group's `rule` where its parameters are no matrices of hidden layers


class Muon(torch.optim.Optimizer):
    """SGD with momentum whose step has all singular values near 1; AdamW for the groups with rule="adamw".

    matrices [..., m, n]   M = b M + (1 - b) g;   O = newton_schulz((1 - b) g + b M)      b = momentum
                           w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(m, n)) O
    the others             AdamW with `betas` and `eps`

    Leading dims are a batch of matrices, such as experts. 0.2 sqrt(max(m, n)) gives a step the root mean square of AdamW's,
    so that both rules share lr and weight_decay. Embeddings, the head and vectors are for AdamW (Jordan et al.).
    Holds one state per element of a matrix, two of the others. Computes `newton_schulz_flops` per matrix and step, in the
    parameters' dtype, so that the numbers do not depend on the ranks. (Jordan et al. and torch compute it in bf16.)
    """

    def __init__(
        self, params, lr: float = 1e-3, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay=0.1, momentum=0.95
    ):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, rule="muon")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self._adamw if group["rule"] == ADAMW else self._muon
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    rule(group, param, self.state[param])
        return loss

    def _muon(self, group: dict, param: Tensor, state: dict) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
        if not param.numel():  # another rank has it
            return
        if param.dim() < 2:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is no matrix, which Muon needs whole; give its group "
                "rule='adamw', and shard by WholeParameterZero"
            )
        direction = newton_schulz(param.grad.lerp(momentum, group["momentum"]))
        param.sub_(direction, alpha=group["lr"] * 0.2 * math.sqrt(max(param.shape[-2:])))

    def _adamw(self, group: dict, param: Tensor, state: dict) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        (b1, b2), t = group["betas"], state["step"].item()
        m = state["exp_avg"].lerp_(param.grad, 1 - b1)
        v = state["exp_avg_sq"].mul_(b2).addcmul_(param.grad, param.grad, value=1 - b2)
        denominator = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
        param.addcdiv_(m, denominator, value=-group["lr"] / (1 - b1**t))


def newton_schulz(matrix: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Return matrices with the singular vectors of `matrix` [..., m, n] and all singular values near 1.

    X = matrix / |matrix|;   A = X X^T;   X = a X + (b A + c A^2) X, `steps` times, on the short side

    The quintic a s + b s^3 + c s^5 is applied to every singular value s. It does not converge to 1: it is steep at 0, so
    that small singular values grow fast, and then stays between 0.68 and 1.21. Those of 2e-3 |matrix| and more get there.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.flatten(-2).norm(dim=-1).clamp(min=1e-7)[..., None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def newton_schulz_flops(shape: tuple[int, ...], steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the FLOPs of `newton_schulz`: per step and matrix, with m <= n, 2 m^2 n + 2 m^3 + 2 m^2 n."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
