"""Operators between ranks, each with its adjoint as backward. They are all that autograd needs to know of communication.

                      forward                                     backward
    copy (f)          x                                           sum of dx over ranks
    all_reduce (g)    sum of x over ranks                         dy
    gather_tokens     all ranks' tokens          [B, T, D]        this rank's tokens of the sum of dy
    scatter_tokens    this rank's tokens of the sum over ranks    all ranks' tokens of dy
    all_to_all        chunk s to rank s                           chunk s back to rank s

Use `copy` where ranks begin to compute different things from one x: each finds a part of dx, and x needs their sum.
Use `all_reduce` where they have the terms of one sum, from which all then compute the same: each has the whole gradient
already. To take one for the other is off by a factor of p. A gradient is never written to: it may be another
operation's too.

The library's: minipar/comm/autograd.py, plus any dim, uneven chunks, send and receive, second derivatives.
Sources: Megatron-LM, arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2.
"""

from torch.autograd import Function


class _Operator(Function):
    @staticmethod
    def forward(ctx, x, operator, adjoint):
        ctx.adjoint = adjoint
        return operator(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.adjoint(dy), None, None


def copy(comm, x):
    return _Operator.apply(x, _same, comm.all_reduce)


def all_reduce(comm, x):
    return _Operator.apply(x, comm.all_reduce, _same)


def gather_tokens(comm, x):
    """x [B, T/p, D] -> [B, T, D]"""
    return _Operator.apply(x, _along_tokens(comm.all_gather), _along_tokens(comm.reduce_scatter))


def scatter_tokens(comm, x):
    """x [B, T, D] -> [B, T/p, D]"""
    if x.shape[1] % comm.size:
        raise ValueError(
            f"{comm.size} ranks do not divide {x.shape[1]} tokens; use minipar.comm.autograd.reduce_scatter"
        )
    return _Operator.apply(x, _along_tokens(comm.reduce_scatter), _along_tokens(comm.all_gather))


def all_to_all(comm, x, send_sizes, recv_sizes):
    """x [sum(send_sizes), ...] -> [sum(recv_sizes), ...], chunks along dim 0"""
    return _Operator.apply(
        x,
        lambda x: comm.all_to_all(x, send_sizes, recv_sizes),
        lambda dy: comm.all_to_all(dy, recv_sizes, send_sizes),
    )


def _same(x):
    return x.view_as(x)


def _along_tokens(collective):
    """Collectives act on dim 0; tokens are dim 1."""
    return lambda x: collective(x.transpose(0, 1).contiguous()).transpose(0, 1)
