"""Sequence parallelism: outside the cut matrices each rank has its own tokens, where tensor parallelism has all of them.

    norm, residual, dropout       [B, T/tp, D]   this rank's tokens
    gather_tokens                 [B, T, D]      (tp-1)/tp * B*T*D elements
    column, row                   [B, T, ...]    as in tensor_parallel.py
    scatter_tokens                [B, T/tp, D]   (tp-1)/tp * B*T*D: the sum of the terms, cut

An all-reduce is a reduce-scatter and an all-gather, so no byte is added; but activations between the matrices are kept
once, not tp times. A weight used on a rank's tokens alone (the norm's) gets a part of its gradient there: `copy` sums it.

The library's: minipar.tensor_parallel(model, comm, sequence_parallel=True), plus attention, the embedding and the head,
and a backward that gathers its input once more in place of keeping it.
Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

import torch
import torch.nn.functional as F

from minipar.simple.autograd import copy, gather_tokens, scatter_tokens


def rms_norm(x, weight, eps=1e-5):
    """Each token scaled to root mean square 1.   x [..., D]   weight [D]"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def block(comm, x, norm, gate, up, down, eps=1e-5):
    """y = x + mlp(norm(x)) on this rank's tokens.   x, y [B, T/tp, D]   norm [D]   gate, up [F/tp, D]   down [D, F/tp]"""
    h = rms_norm(x, copy(comm, norm), eps)
    h = gather_tokens(comm, h)  # backward: a reduce-scatter, so no copy operator is needed
    h = F.silu(h @ gate.t()) * (h @ up.t())
    return x + scatter_tokens(comm, h @ down.t())
