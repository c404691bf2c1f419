"""Muon: a matrix is updated by its orthogonalized momentum, for which flat shards are not enough.

With ZeRO, each rank therefore gets complete matrices: see `whole_parameters.py`.
Source: Jordan et al., Muon, 2024 (kellerjordan.github.io/posts/muon); for the scale of a step, Moonlight, arXiv:2502.16982,
section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from minipar.extras.optimizers.tensor_lists import trained_lists, update_moments

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic: see newton_schulz
NEWTON_SCHULZ_STEPS = 5
BATCH_ELEMS = 1 << 24  # maximum elements orthogonalized together, which takes a few tensors of that size
ADAMW = "adamw"  # the `rule` of all groups except those of hidden layers' matrices


class Muon(torch.optim.Optimizer):
    """SGD with momentum whose step has all singular values near 1; AdamW for the groups with rule="adamw".

    matrices [..., m, n]   M = b M + (1 - b) g;   O = newton_schulz((1 - b) g + b M)      b = momentum
                           w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(m, n)) O
    rule="adamw"           AdamW with `betas` and `eps`

    Leading dims are a batch of matrices, such as experts. The factor 0.2 sqrt(max(m, n)) gives a step the root mean square
    of an AdamW step, so that both rules share lr and weight_decay. Embeddings, the head and vectors belong in AdamW's
    groups (Jordan et al.).
    The state is one value per element of a matrix, and two per other element. Computes `newton_schulz_flops` per matrix and
    step, in the parameters' dtype, so that the result does not depend on the number of ranks. (Jordan et al. and torch use
    bf16.) Matrices of one shape are orthogonalized together, so the number of GPU kernels in a step grows with the number
    of shapes, not of parameters.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ):
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum=momentum, rule="muon")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, params in trained_lists(self.param_groups):
            if group["rule"] != ADAMW:
                _require_matrices(params)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            (self._adamw if group["rule"] == ADAMW else self._muon)(group, params)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        for alike in _by_shape(params):
            momenta = [self.state[p]["momentum_buffer"] for p in alike]
            grads = [p.grad for p in alike if p.grad is not None]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            directions = torch._foreach_lerp(grads, momenta, group["momentum"])
            steps = newton_schulz(torch.stack(directions)).contiguous().unbind()
            scale = 0.2 * math.sqrt(max(alike[0].shape[-2:]))
            torch._foreach_sub_(alike, steps, alpha=group["lr"] * scale)

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        moments = update_moments(group, params, self.state)
        sizes = [-group["lr"] / correction for correction in moments.corrections]
        torch._foreach_addcdiv_(params, moments.means, moments.denominators, sizes)


def _require_matrices(params: list[Tensor]) -> None:
    for param in params:
        if param.numel() and param.dim() < 2:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is no matrix, which Muon needs whole; give its group "
                "rule='adamw', and shard by WholeParameterZero"
            )


def _by_shape(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of the same shape, with at most BATCH_ELEMS elements in all, or a single larger parameter.

    Skip empty parameters.
    """
    lists: dict[torch.Size, list[Tensor]] = {}
    for param in params:
        if param.numel():
            lists.setdefault(param.shape, []).append(param)
    for shape, alike in lists.items():
        size = max(1, BATCH_ELEMS // shape.numel())
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


def newton_schulz(matrix: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Return matrices with the singular vectors of `matrix` [..., m, n] and all singular values near 1.

    X = matrix / |matrix|, transposed if m > n;   A = X X^T;   X = a X + (b A + c A^2) X, `steps` times

    Each step maps every singular value s to a s + b s^3 + c s^5. The iteration does not converge to 1. The map is steep at
    0, so that small singular values grow fast; those of at least 2e-3 |matrix| end between 0.68 and 1.21.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = matrix.mT if tall else matrix
    x = x / x.flatten(-2).norm(dim=-1).clamp(min=1e-7)[..., None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def newton_schulz_flops(shape: tuple[int, ...], steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the FLOPs of `newton_schulz`: per step and matrix, with m <= n, 2 m^2 n + 2 m^3 + 2 m^2 n."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
