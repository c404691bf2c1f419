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
        self.comm, self.rank, self.residual, self.q = comm, rank, 0.0, None

    def __call__(self, gradient):
        """gradient [n, m]  ->  [n, m]"""
        if self.comm.size == 1:
            return gradient  # with one rank, nothing is sent
        matrix = gradient + self.residual
        if self.q is None:  # the same random start on every rank
            generator = torch.Generator().manual_seed(0)
            self.q = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)
        p = torch.linalg.qr(self.comm.all_reduce(matrix @ self.q, "mean")).Q
        self.q = self.comm.all_reduce(matrix.t() @ p, "mean")
        sent = p @ self.q.t()
        self.residual = matrix - sent
        return sent
