"""Ulysses: for the attention alone, an all-to-all turns each rank's tokens of all heads into all tokens of its heads.

    [B, H, N/p, d] -- all-to-all --> [B, H/p, N, d] -- any attention --> [B, H/p, N, d] -- all-to-all --> [B, H, N/p, d]

    two ranks, heads a and b,           before         after
    tokens 0 to 3             rank 0    a0 a1 b0 b1    a0 a1 a2 a3        it has kept a0 a1, and sent b0 b1 to rank 1
                              rank 1    a2 a3 b2 b3    b0 b1 b2 b3

Attention acts per head, so between the two all-to-alls no rank communicates, and all ranks have equal work with any mask.
Each rank sends 4 N h (p-1)/p^2 elements forward for each sample of N tokens, h = heads * head_dim, and as many backward.

In the library: minipar.ulysses_attention, plus grouped queries, heads that p does not divide, other layouts, documents.
Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

import torch
import torch.nn.functional as F

from .autograd import all_to_all


def ulysses_attention(comm, q, k, v, causal=True):
    """This rank's tokens of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/p, head_dim]"""
    if not q.shape == k.shape == v.shape or q.shape[1] % comm.size:
        raise ValueError(
            f"{comm.size} ranks, q {list(q.shape)}, k {list(k.shape)}: use minipar.ulysses_attention"
        )
    qkv = all_tokens_some_heads(comm, torch.stack((q, k, v)))
    out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
    return some_tokens_all_heads(comm, out[None])[0]


def all_tokens_some_heads(comm, x):
    """[n, B, H, N/p, d] -> [n, B, H/p, N, d]"""
    parts = torch.stack(x.chunk(comm.size, 2))  # [p, n, B, H/p, N/p, d]: my tokens, heads of rank s
    return torch.cat(tuple(swap(comm, parts)), dim=3)  # received: tokens of rank s, my heads


def some_tokens_all_heads(comm, x):
    """[n, B, H/p, N, d] -> [n, B, H, N/p, d]"""
    parts = torch.stack(x.chunk(comm.size, 3))  # [p, n, B, H/p, N/p, d]: tokens of rank s, my heads
    return torch.cat(tuple(swap(comm, parts)), dim=2)  # received: my tokens, heads of rank s


def swap(comm, x):
    """Send x[s] to rank s; index s of the result is from rank s."""
    ones = [1] * comm.size
    return all_to_all(comm, x, ones, ones)
