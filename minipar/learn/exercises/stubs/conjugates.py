"""Communication that autograd differentiates: the backward of y = A x is dx = A^T dy.

                      y                                           dx
    copy              x, the same on every rank                   ?
    all_reduce        sum of x over ranks                         ?
    gather_tokens     all ranks' tokens of x                      ?
    scatter_tokens    this rank's tokens of the sum over ranks    ?

A is a linear operation on the tensors of all ranks, and A^T its transpose, or adjoint. Ask of each operator whether dy is
the same on all ranks. After `copy` and `gather_tokens` it is not: each rank goes on with y in its own way, so its dy is a
part of the gradient. After `all_reduce` it is the same: all ranks compute the same from y.

Checked: the y and dx of one process; <z, A x> = <A^T z, x> for any z, where a tensor that is the same on all ranks counts
once; neither x nor dy is written to, because other operations read them too. Two of the operators are Megatron's f and g.
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
