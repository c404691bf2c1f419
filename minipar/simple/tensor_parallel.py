"""Tensor parallelism: tp ranks compute one layer together, each with a part of every matrix.

    column parallel   y = x w^T, w sharded by rows [out/tp, in]      each rank computes its own features of y
    row parallel      y = x w^T, w sharded by columns [out, in/tp]   each rank computes a term of y; an all-reduce sums them

A weight is [out, in], as in nn.Linear, so each row of w makes one column of y. Between a column-parallel and a row-parallel
matrix, anything that acts per feature or per head needs no communication. Such a pair has one all-reduce in the forward, on
its output (`all_reduce`), and one in the backward, on the gradient of its input (`copy`):

    x --copy--> [column parallel] --> per feature or head --> [row parallel] --all_reduce--> y

A layer of attention and MLP is two pairs: each rank sends 8 (tp-1)/tp * B*T*D elements, forward and backward together.
sequence_parallel.py replaces `copy` and `all_reduce` at the two ends, `enter` and `leave`, by another pair of operators.

In the library: minipar.ColumnParallelLinear and minipar.tensor_parallel, which add biases, all-reduces that overlap with
the weights' gradients, sequence parallelism, key/value heads shared by several ranks, the whole model.
Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import torch.nn.functional as F

from .autograd import all_reduce, copy


def rows(comm, w):
    """This rank's rows of w, for a column-parallel product."""
    return _part(comm, w, 0)


def columns(comm, w):
    """This rank's columns of w, for a row-parallel product."""
    return _part(comm, w, 1)


def _part(comm, w, dim):
    if w.shape[dim] % comm.size:
        raise ValueError(
            f"tp={comm.size} does not divide {w.shape[dim]} features; minipar.tensor_parallel says what does"
        )
    return w.detach().chunk(comm.size, dim)[comm.rank].clone().requires_grad_()


def column_parallel(x, w):
    """x [B, T, D], the output of `copy`, the same on every rank; w [F/tp, D]  ->  [B, T, F/tp], this rank's features"""
    return x @ w.t()


def row_parallel(comm, x, w, leave=all_reduce):
    """x [B, T, D/tp], this rank's features; w [F, D/tp]  ->  [B, T, F], the same on every rank"""
    return leave(comm, x @ w.t())


def mlp(comm, x, gate, up, down, enter=copy, leave=all_reduce):
    """SwiGLU, y = (silu(x gate^T) * x up^T) down^T.   gate, up [F/tp, D]   down [D, F/tp]   x, y [B, T, D]"""
    x = enter(comm, x)  # one `enter` for both products: one all-reduce of dx
    hidden = F.silu(column_parallel(x, gate)) * column_parallel(
        x, up
    )  # elementwise: no rank needs another rank's features
    return row_parallel(comm, hidden, down, leave)


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(comm, x, q, k, v, o, head_dim, enter=copy, leave=all_reduce, core=causal_attention):
    """Causal self-attention; each rank has some of the heads.   q, k, v [D/tp, D]   o [D, D/tp]   x, y [B, T, D]

    core   computes each head's attention; for long sequences it may be ring_attention.py's
    """
    if q.shape[0] % head_dim:
        raise ValueError(
            f"a rank's {q.shape[0]} features are no whole heads of {head_dim}; use minipar.tensor_parallel"
        )
    x = enter(comm, x)
    B, T, _ = x.shape
    q, k, v = (column_parallel(x, w).view(B, T, -1, head_dim).transpose(1, 2) for w in (q, k, v))
    mixed = core(q, k, v)  # each head independently
    return row_parallel(comm, mixed.transpose(1, 2).reshape(B, T, -1), o, leave)
