"""PowerSGD: the mean of a matrix over ranks as the product of two thin ones."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.data_parallel.compress.codecs import require_finite
from minipar.errors import require_positive


class PowerSGD:
    """One step of subspace iteration on M = mean over ranks of (gradient + residual), [n, m], with warm start.

    P = mean M Q       all-reduce of n r elements
    P = orthonormal columns of P
    Q = mean M^T P     all-reduce of m r elements
    sent = P Q^T;   residual = (gradient + residual) - sent

    Both products are linear in M, so plain all-reduces sum them: unlike signs or top-k it needs no exchange of its own.
    Vectors, and matrices for which r (n + m) >= n m, are reduced as they are. Tensors of more dimensions are matrices of
    their first dimension by the rest. Sends 2(p-1)/p * r (n + m) elements.
    Raises ValueError for a rank below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:1905.13727, algorithm 1.
    """

    by_parameter = True  # DDP gives it one gradient at a time, in its shape

    def __init__(self, comm, rank: int = 2, seed: int = 0, error_feedback: bool = True):
        require_positive(rank=rank)
        self.comm, self.rank, self.seed, self.error_feedback = comm, rank, seed, error_feedback
        self.residuals: dict[object, Tensor] = {}
        self._factors: dict[object, Tensor] = {}  # Q of the step before: where the iteration goes on

    @torch.no_grad()
    def __call__(self, x: Tensor, key=0) -> Tensor:
        """Return an approximation of the mean of x over ranks, in its shape and dtype."""
        require_finite(x, "a gradient")
        if x.dim() < 2 or self._is_small(*_matrix_shape(x)):
            return self.comm.all_reduce(x, "mean")
        local = x.float().reshape(_matrix_shape(x))
        if key in self.residuals:
            local = local + self.residuals[key]
        p = _orthonormal(self.comm.all_reduce(local @ self._factor(key, local), "mean"))
        q = self.comm.all_reduce(local.t() @ p, "mean")
        self._factors[key] = q
        mean = p @ q.t()
        if self.error_feedback:
            self.residuals[key] = local - mean
        return mean.view(x.shape).to(x.dtype)

    def _is_small(self, n: int, m: int) -> bool:
        return self.rank * (n + m) >= n * m

    def _factor(self, key, local: Tensor) -> Tensor:
        if key not in self._factors:
            generator = torch.Generator().manual_seed(self.seed)  # the same on every rank
            self._factors[key] = torch.randn(local.shape[1], self.rank, generator=generator).to(local.device)
        return self._factors[key]

    def sent_elements(self, shape) -> int:
        """The elements that are all-reduced for a tensor of this shape."""
        n, m = _matrix_shape(torch.empty(shape, device="meta")) if len(shape) > 1 else (1, shape[0])
        return n * m if len(shape) < 2 or self._is_small(n, m) else self.rank * (n + m)


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x[0].numel()


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.qr(x).Q
