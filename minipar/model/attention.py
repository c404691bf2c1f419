"""Causal self-attention with grouped queries, and the functions that compute its core."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from minipar.model.deferrable_linear import Linear
from minipar.model.flash import flash_attention
from minipar.model.mask import whole_mask
from minipar.model.model_config import ModelConfig
from minipar.model.overrides import AttentionOverrides
from minipar.model.rope import rotate, rotation


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, positions: Tensor | None = None
) -> Tensor:
    """Attention as it is defined: out = softmax(q k^T / sqrt(head_dim)) v, written out.

    q, out     [B, H, T, head_dim]
    k, v       [B, H/g, S, head_dim]    each serves g neighbouring query heads
    positions  None, or [T] or [B, T]   each token's place in its document: it sees its own document only

    `causal`: queries are the last of the sequence whose keys are given: query i sees keys 0 ... S - T + i.
    Keeps B*H*T*S probabilities for the backward.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        hidden = whole_mask(q.shape[2], k.shape[2], causal, positions).hidden()
        scores = scores.masked_fill(hidden.to(q.device), -math.inf)
    return scores.softmax(-1) @ v


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, positions: Tensor | None = None
) -> Tensor:
    """`plain_attention` by torch's fused kernels, which keep a number a query instead of the probabilities.

    For documents they need the mask, T*S bytes, which `flash_attention` does not; and for several queries after other
    keys, since what the kernels call causal has query i see keys 0 ... i. One query sees all keys.
    """
    grouped, (T, S) = q.shape[1] != k.shape[1], (q.shape[2], k.shape[2])
    if positions is None and (not causal or T == S or T == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and T == S, enable_gqa=grouped)
    seen = ~whole_mask(T, S, causal, positions).hidden().to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


CORES = {"plain": plain_attention, "fused": fused_attention, "flash": flash_attention}


class Attention(nn.Module):
    """Project to queries, keys and values, turn by position, mix tokens by `core`, project back.

    x, y  [B, T, D]
    q     [B, T, num_heads, head_dim]        k, v  [B, T, num_kv_heads, head_dim]

    `num_heads` and `num_kv_heads` are those that *this module* computes. `core` mixes tokens, on [B, heads, T, head_dim];
    where samples hold documents it is given their positions. With a key/value cache, k and v have the earlier tokens' too.
    Overridden: see `AttentionOverrides`.
    """

    def __init__(self, config: ModelConfig, device=None, dtype=None):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.documents, self.own_core = config.documents, CORES[config.attention]
        self.overrides = AttentionOverrides()
        factory = {"device": device, "dtype": dtype}
        kv_dim = config.num_kv_heads * config.head_dim
        self.q = Linear(config.dim, config.dim, **factory)
        self.k = Linear(config.dim, kv_dim, **factory)
        self.v = Linear(config.dim, kv_dim, **factory)
        self.o = Linear(config.dim, config.dim, **factory)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotation(positions, self.head_dim, self.rope_theta, x.dtype)
        q, k, v = (self.overrides.project_qkv or self.project_qkv)(x)
        q = rotate(self._heads(q, self.num_heads), cos, sin)
        k = rotate(self._heads(k, self.num_kv_heads), cos, sin)
        v = self._heads(v, self.num_kv_heads)
        of_documents = {"positions": positions} if self.documents else {}
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.overrides.cache is not None:
            k, v = self.overrides.cache.extend(k, v)
        out = self.core(q, k, v, causal=True, **of_documents)
        return self.o(out.transpose(1, 2).flatten(2))

    @property
    def core(self):
        return self.overrides.core or self.own_core

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, self.head_dim))
