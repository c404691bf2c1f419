"""Communication that autograd differentiates: each operator here is linear, and its backward is the transposed operator.

                      forward: y                                       backward: dx
    copy (f)          x                                                sum of dy over ranks
    all_reduce (g)    sum of x over ranks                              dy
    gather_tokens     all ranks' tokens of x                           this rank's tokens of the sum of dy over ranks
    scatter_tokens    this rank's tokens of the sum of x over ranks    all ranks' tokens of dy
    all_to_all        chunk s of x is sent to rank s                   chunk s of dy is sent back to rank s

Use `copy` where all ranks have the same x and each computes something different from it: each rank's dy is then only a part
of the gradient of x, and the parts must be summed. Use `all_reduce` where each rank has one term of a sum and all ranks
compute the same from the result: dy is then already complete on every rank. Summing a complete gradient makes it p times
too large; not summing the parts leaves each rank with only its own. No backward writes to dy: other operations may read it.

In the library: minipar/comm/autograd.py, which adds any dim, uneven chunks, send and receive, second derivatives.
Sources: Megatron-LM, arXiv:1909.08053, section 3 (f, g); arXiv:2205.05198, section 4.2.2 (g, g-bar: the pair for tokens).
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
    """Return a function that does along dim 1, the tokens, what `collective` does along dim 0."""
    return lambda x: collective(x.transpose(0, 1).contiguous()).transpose(0, 1)
