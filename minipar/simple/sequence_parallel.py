"""Sequence parallelism: outside the tensor-parallel matrices, each rank has T/tp of the tokens instead of all of them.

    norm, residual, dropout       [B, T/tp, D]   this rank's tokens
    gather_tokens                 [B, T, D]      all-gather: sends (tp-1)/tp * B*T*D elements
    column, row parallel          [B, T, ...]    as in tensor_parallel.py; each rank has one term of the result
    scatter_tokens                [B, T/tp, D]   reduce-scatter of the terms: sends (tp-1)/tp * B*T*D

    tensor parallel      x, all tokens  --copy-----------> column, row --all_reduce------> y, all tokens
    sequence parallel    x, own tokens  --gather_tokens--> column, row --scatter_tokens--> y, own tokens

An all-reduce is a reduce-scatter and an all-gather, so the activations cause no more traffic than in tensor_parallel.py;
but outside the matrices each is kept once, not on all tp ranks. The norm's weight is the same on every rank, and a rank's
tokens give only a part of its gradient: `copy` sums the parts.

In the library: minipar.tensor_parallel(model, comm, sequence_parallel=True), which adds attention, the embedding and the
head, and a backward that gathers its input again instead of keeping it.
Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

import torch

from .autograd import copy, gather_tokens, scatter_tokens
from .tensor_parallel import mlp


def rms_norm(x, weight, eps=1e-5):
    """Scale each token to root mean square 1, then each feature by its weight.   x [..., D]   weight [D]"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def block(comm, x, norm, gate, up, down, eps=1e-5):
    """y = x + mlp(norm(x)) on this rank's tokens.   x, y [B, T/tp, D]   norm [D]   gate, up [F/tp, D]   down [D, F/tp]"""
    h = rms_norm(x, copy(comm, norm), eps)
    # gather_tokens sums dh over ranks in its backward, so the products need no `copy`.
    return x + mlp(comm, h, gate, up, down, enter=gather_tokens, leave=scatter_tokens)
