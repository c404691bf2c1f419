"""A column- and a row-parallel matrix: y = (silu(x gate^T) * x up^T) down^T, computed by p ranks together.

    gate, up    cut by rows:    each rank computes its own features of the hidden layer
    down        cut by columns: each rank computes a partial sum of y, one summand of full size

Checked: y and every gradient as in one process; one all-reduce forward and one backward, which together send 4(p-1)/p of
x's bytes.
"""


def mlp(comm, x, gate, up, down):
    """x, y [B, T, D], the same on every rank; gate, up [F/p, D], down [D, F/p]. Use minipar.simple.autograd."""
    raise NotImplementedError
