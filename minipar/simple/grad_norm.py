"""The norm of a whole model's gradient, whichever ranks hold its parts: each element counts once.

    norm^2 = sum over ranks and gradients of |g|^2 / copies        copies: the number of ranks that hold the same g

Under tensor parallelism the shards of a matrix are counted where they are, and an RMSNorm's weight, equal on all tp ranks,
is counted 1/tp on each. Squares are added before the root is taken, in float64: in float32 they can overflow. One number is
sent. Every rank gets the same norm, so all ranks clip by the same factor.

In the library: minipar.clip_grad_norm_, which finds the numbers of copies from each parameter's placement.
"""

import torch


def grad_norm(comm, grads, copies):
    """Return the norm over all ranks of `comm`.   grads: this rank's   copies[i]: how many ranks hold grads[i]"""
    squares = [g.double().square().sum() / n for g, n in zip(grads, copies)]
    return comm.all_reduce(sum(squares, torch.zeros((), dtype=torch.float64, device=comm.device))).sqrt()
