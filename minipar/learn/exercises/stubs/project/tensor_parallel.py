"""A column- and a row-parallel matrix: y = (silu(x gate^T) * x up^T) down^T, computed by p ranks together.

    gate, up    cut by rows:    each rank computes its own features of the hidden layer
    down        cut by columns: each rank computes one term of y

    enter(comm, x)   before the first products: `copy` passes x on, and its backward sums the gradients over ranks
    leave(comm, y)   after the last one: `all_reduce` sums the terms, and its backward passes the gradient on

Sequence parallelism, `python train.py --sequence`, calls mlp with another pair: `gather_tokens` and `scatter_tokens`.

Checked: y and every gradient as in one process; one all-reduce forward and one backward, which together send 4(p-1)/p of
x's bytes.
"""

from minipar.simple.autograd import all_reduce, copy


def mlp(comm, x, gate, up, down, enter=copy, leave=all_reduce):
    """x, y [B, T, D], the same on every rank; gate, up [F/p, D], down [D, F/p]."""
    raise NotImplementedError
