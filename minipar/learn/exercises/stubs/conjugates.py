"""Communication that autograd differentiates: the backward of y = A x is dx = A^T dy.

                      y                                           dx
    copy              x, the same on every rank                   ?
    all_reduce        sum of x over ranks                         ?
    gather_tokens     all ranks' tokens of x                      ?
    scatter_tokens    this rank's tokens of the sum over ranks    ?

In inner products, a tensor that is the same on all ranks counts once. Checked: <y, A x> = <A^T y, x>; neither x nor dy is
written to, because other operations read them too. Two of these operators are Megatron's f and g.
"""


def copy(comm, x):
    """x [B, T, D] -> [B, T, D]"""
    raise NotImplementedError


def all_reduce(comm, x):
    """x [B, T, D] -> [B, T, D]"""
    raise NotImplementedError


def gather_tokens(comm, x):
    """x [B, T/p, D] -> [B, T, D]"""
    raise NotImplementedError


def scatter_tokens(comm, x):
    """x [B, T, D] -> [B, T/p, D]"""
    raise NotImplementedError
