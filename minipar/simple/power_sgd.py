"""PowerSGD: the mean of a gradient matrix over ranks, as the product of two thin matrices.

    M = gradient + residual                          [n, m], each rank's own
    P = orthonormal(mean over ranks of M Q)          [n, r]; r, the approximation's rank, is 1 to 4
    Q = mean over ranks of M^T P                     [m, r]; kept for the next step, which starts from it
    sent = P Q^T         residual = M - sent

All ranks multiply by the same Q and by the same P, and mean(M Q) = mean(M) Q. So ordinary all-reduces can average the
products M Q and M^T P: r (n + m) elements instead of n m. Since Q is kept, each call is a further step of power iteration,
and comes closer to the largest singular directions of the mean. The part of M that a step misses is in the residual, and is
sent later.

In the library: minipar.extras.compress.PowerSGD, which adds vectors, tensors, matrices that are too small to save anything,
and a state that can be saved.
Source: arXiv:1905.13727, algorithms 1 and 2.
"""

import torch


class PowerSGD:
    """An approximate mean over ranks, equal on all of them. Call it on each step's gradient of one weight."""

    def __init__(self, comm, rank):
        if rank < 1:
            raise ValueError(f"rank={rank}; use 1 or more, as minipar.extras.compress.PowerSGD does")
        self.comm, self.rank, self.residual, self.qt = comm, rank, 0.0, None  # qt [r, m] is Q^T

    def __call__(self, gradient):
        """gradient [n, m]  ->  [n, m]"""
        if self.comm.size == 1:
            return gradient  # with one rank, nothing is sent
        matrix = gradient + self.residual
        if self.qt is None:  # the same random start on every rank
            generator = torch.Generator().manual_seed(0)
            self.qt = torch.randn(matrix.shape[1], self.rank, generator=generator).t().to(matrix)
        # M Q as (Q^T M^T)^T, and Q^T = P^T M: with the thin matrix on the left, torch's product is several times as fast.
        p = torch.linalg.qr(self.comm.all_reduce(self.qt @ matrix.t(), "mean").t()).Q
        self.qt = self.comm.all_reduce(p.t() @ matrix, "mean")
        sent = p @ self.qt
        self.residual = matrix - sent
        return sent
