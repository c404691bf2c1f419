"""PowerSGD: the mean of a matrix over ranks, approximated by the product of two thin matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.extras.compress.codecs import require_finite
from minipar.extras.compress.plain_mean import Compressor, Means, PlainMean, State, Tensors, widened
from minipar.support.errors import require_positive


class PowerSGD(Compressor):
    """One step of subspace iteration on M = mean over ranks of (gradient + residual), [n, m], with warm start.

    P = mean M Q       all-reduce of n r elements
    P = orthonormal columns of P
    Q = mean M^T P     all-reduce of m r elements
    sent = P Q^T;   residual = (gradient + residual) - sent

    Both products are linear in M, so plain all-reduces can sum them (signs and top-k are not, and need the two phases of
    compressed_mean.py). All matrices share the same two all-reduces. Vectors, and matrices with r (n + m) >= n m, are
    reduced uncompressed in the first of the two. A tensor of more than two dimensions is flattened to a matrix: its first
    dimension by the product of the others.
    Sends 2(p-1)/p * r (n + m) elements.
    Raises ValueError for a rank below 1, ArithmeticError for a gradient that is not finite.
    Source: arXiv:1905.13727, algorithm 1, with the error feedback of algorithm 2, as in its authors' RankKReducer
    (epfml/powersgd). Unlike the authors' code, this one uses QR instead of Gram-Schmidt (columns may differ in sign, but P
    Q^T is the same), sends small matrices uncompressed, and leaves the momentum of algorithm 2 to the optimizer.
    """

    def __init__(self, comm: Comm, rank: int = 2):
        require_positive(rank=rank)
        self.comm, self.rank = comm, rank
        self.plain = PlainMean(comm)
        self.residuals: dict[object, Tensor] = {}
        # Q^T [r, m] of the last step, with which the next step begins
        self._factors: dict[object, Tensor] = {}

    def _means(self, tensors: Tensors) -> Means:
        for x in tensors.values():
            require_finite(x, "a gradient")
        thin = {key: x for key, x in tensors.items() if not self._is_whole(x)}
        local = {key: widened(x).reshape(_matrix_shape(x)) for key, x in thin.items()}
        for key in self.residuals.keys() & local.keys():
            local[key] = local[key] + self.residuals[key].view_as(local[key])
        # M Q as (Q^T M^T)^T: with the thin matrix on the left, torch's product is several times as fast on a CPU.
        products = {key: self._factor(key, x) @ x.t() for key, x in local.items()}
        found = self.plain.means(products | {key: x for key, x in tensors.items() if key not in thin})
        p = {key: _orthonormal(found[key].t()) for key in thin}
        qt = self.plain.means({key: p[key].t() @ x for key, x in local.items()})
        self._factors |= qt
        for key, x in thin.items():
            mean = p[key] @ qt[key]
            self.residuals[key] = (local[key] - mean).view(x.shape)
            found[key] = mean.view(x.shape).to(x.dtype)
        return {key: found[key] for key in tensors}

    def _is_whole(self, x: Tensor) -> bool:
        return x.dim() < 2 or self.rank * sum(_matrix_shape(x)) >= x.numel()

    def _factor(self, key: object, local: Tensor) -> Tensor:
        if key not in self._factors:
            generator = torch.Generator().manual_seed(0)  # the same on every rank
            self._factors[key] = torch.randn(local.shape[1], self.rank, generator=generator).t().to(local)
        return self._factors[key]

    def state(self) -> State:
        """Return, by key, this rank's "residual", and the "factor" Q [m, r]. Sends nothing."""
        factors = {key: qt.t().contiguous() for key, qt in self._factors.items()}
        return {key: {"residual": x, "factor": factors[key]} for key, x in self.residuals.items()}

    def load(self, state: State) -> None:
        for key, own in state.items():
            self.residuals[key] = own["residual"]
            self._factors[key] = own["factor"].t().contiguous()


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x[0].numel()


def _orthonormal(x: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(x).Q
    return q
