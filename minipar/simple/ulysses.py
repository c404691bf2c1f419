"""Ulysses: for the attention alone, each rank gives some tokens of all heads for all tokens of some heads.

    [B, H, N/P, d] -- all-to-all --> [B, H/P, N, d] -- any attention --> [B, H/P, N, d] -- all-to-all --> [B, H, N/P, d]

Attention is head by head, so between the two it needs no communication, and every rank has the same work whatever the mask.
Each rank sends 4 N h (P-1)/P^2 elements forward for each sample of N tokens, h = heads * head_dim, and as many backward.

The library's: minipar.ulysses_attention, plus grouped queries, heads that P does not divide, other layouts, documents.
Source: DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
"""

import torch
import torch.nn.functional as F

from minipar.simple.autograd import all_to_all


def ulysses_attention(comm, q, k, v, causal=True):
    """This rank's part of softmax(q k^T / sqrt(head_dim)) v.   q, k, v, out [B, H, N/P, head_dim]"""
    if not q.shape == k.shape == v.shape or q.shape[1] % comm.size:
        raise ValueError(
            f"{comm.size} ranks, q {list(q.shape)}, k {list(k.shape)}: use minipar.ulysses_attention"
        )
    qkv = _heads_for_tokens(comm, torch.stack((q, k, v)))
    out = F.scaled_dot_product_attention(*qkv, is_causal=causal)
    return _tokens_for_heads(comm, out[None])[0]


def _heads_for_tokens(comm, x):
    """[n, B, H, N/P, d] -> [n, B, H/P, N, d]"""
    parts = torch.stack(x.chunk(comm.size, 2))  # [P, n, B, H/P, N/P, d]: my tokens of every rank's heads
    return torch.cat(tuple(_swap(comm, parts)), dim=3)  # for every rank's tokens of my heads


def _tokens_for_heads(comm, x):
    """[n, B, H/P, N, d] -> [n, B, H, N/P, d]"""
    parts = torch.stack(x.chunk(comm.size, 3))  # [P, n, B, H/P, N/P, d]: my heads of every rank's tokens
    return torch.cat(tuple(_swap(comm, parts)), dim=2)  # for every rank's heads of my tokens


def _swap(comm, x):
    """x[s] goes to rank s; what came from rank s is at x[s]."""
    ones = [1] * comm.size
    return all_to_all(comm, x, ones, ones)
