"""Tensor parallelism: one layer computed by tp ranks together, each with a part of every matrix.

    column parallel   y = x w^T, w cut by rows [F/tp, D]: each rank has its own features of y. No communication forward
    row parallel      y = x w^T, w cut by columns [F, D/tp]: each rank has a term of the sum that is y. One all-reduce

A column-parallel matrix, anything that works feature by feature or head by head, and a row-parallel matrix follow one
another without a word between ranks: one all-reduce at the end forward, and one at the beginning backward. So a layer of
attention and MLP sends 8 (tp-1)/tp * B*T*D elements, forward and backward.

The library's: minipar.ColumnParallelLinear and minipar.tensor_parallel, plus biases, sums that overlap the weights'
gradients, sequence parallelism, key/value heads that ranks share, the whole model.
Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import torch.nn.functional as F

from minipar.simple.autograd import all_reduce, copy


def rows(comm, w):
    """This rank's rows of a matrix, for a column-parallel product (y's columns are w's rows)."""
    return _part(comm, w, 0)


def columns(comm, w):
    """This rank's columns, for a row-parallel product."""
    return _part(comm, w, 1)


def _part(comm, w, dim):
    if w.shape[dim] % comm.size:
        raise ValueError(
            f"tp={comm.size} does not divide {w.shape[dim]} features; minipar.tensor_parallel says what does"
        )
    return w.detach().chunk(comm.size, dim)[comm.rank].clone().requires_grad_()


def column_parallel(x, w):
    """x [B, T, D] the same on every rank, out of `copy`; w [F/tp, D]  ->  [B, T, F/tp]"""
    return x @ w.t()


def row_parallel(comm, x, w):
    """x [B, T, D/tp], this rank's features; w [F, D/tp]  ->  [B, T, F], the same on every rank"""
    return all_reduce(comm, x @ w.t())


def mlp(comm, x, gate, up, down):
    """SwiGLU, y = (silu(x gate^T) * x up^T) down^T.   gate, up [F/tp, D]   down [D, F/tp]   x, y [B, T, D]"""
    x = copy(comm, x)  # once for both products: one sum of dx
    hidden = F.silu(column_parallel(x, gate)) * column_parallel(x, up)  # feature by feature
    return row_parallel(comm, hidden, down)


def attention(comm, x, q, k, v, o, head_dim):
    """Causal self-attention; each rank has some heads.   q, k, v [D/tp, D]   o [D, D/tp]   x, y [B, T, D]"""
    if q.shape[0] % head_dim:
        raise ValueError(
            f"a rank's {q.shape[0]} features are no whole heads of {head_dim}; use minipar.tensor_parallel"
        )
    x = copy(comm, x)
    B, T, _ = x.shape
    q, k, v = (column_parallel(x, w).view(B, T, -1, head_dim).transpose(1, 2) for w in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # head by head
    return row_parallel(comm, mixed.transpose(1, 2).reshape(B, T, -1), o)
