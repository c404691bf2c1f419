"""Causal self-attention with grouped queries, and the functions that compute its core."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.config.model_config import ModelConfig
from minipar.model.deferrable_linear import Linear
from minipar.model.flash import flash_attention
from minipar.model.mask import single_process_mask
from minipar.model.norm import RMSNorm
from minipar.model.overrides import AttentionCore, AttentionOverrides
from minipar.model.rope import rotate, rotation


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, positions: Tensor | None = None
) -> Tensor:
    """Compute attention by its definition: out = softmax(q k^T / sqrt(head_dim)) v.

    q, out     [B, H, T, head_dim]
    k, v       [B, H/g, S, head_dim]    each head serves g consecutive query heads
    causal     the queries are the last T of the S tokens: query i sees keys 0 ... S - T + i
    positions  None, or [T] or [B, T]   each token's position in its document; a token sees only its own document

    Keeps B*H*T*S probabilities for the backward. Like the other cores, raises ValueError for positions without causal.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if positions is not None or (causal and q.shape[2] > 1):  # a single query sees all keys
        hidden = single_process_mask(q.shape[2], k.shape[2], causal, positions).hidden()
        scores = scores.masked_fill(hidden.to(q.device), -math.inf)
    return scores.softmax(-1) @ v


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, positions: Tensor | None = None
) -> Tensor:
    """Compute `plain_attention` by torch's fused kernels, which keep one number per query instead of the probabilities.

    The kernels need a dense mask of T*S bytes in two cases: for documents (`flash_attention` needs no mask there), and for
    causal attention with 1 < T < S, since the kernels' own causal mask lets query i see keys 0 ... i. With T = 1, the
    query sees all keys, so no mask is needed.
    """
    grouped, (T, S) = q.shape[1] != k.shape[1], (q.shape[2], k.shape[2])
    if positions is None and (not causal or T == S or T == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and T == S, enable_gqa=grouped)
    seen = ~single_process_mask(T, S, causal, positions).hidden().to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


CORES: dict[str, AttentionCore] = {
    "plain": plain_attention,
    "fused": fused_attention,
    "flash": flash_attention,
}


class Attention(nn.Module):
    """Self-attention: project to queries, keys and values, rotate by position, apply `core`, project back.

    x, y  [B, T, D]
    q     [B, T, num_heads, head_dim]        k, v  [B, T, num_kv_heads, head_dim]

    With `qkv_bias`, q, k and v have biases; with `qk_norm`, each head's q and k are normed before they are rotated.

    `num_heads` and `num_kv_heads` count the heads that *this module* computes. `core` computes attention on
    [B, heads, T, head_dim], and gets `positions` where samples hold documents. With a key/value cache, `core` also gets
    the keys and values of earlier tokens. Override points: `AttentionOverrides`.
    """

    def __init__(self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        assert config.num_kv_heads is not None
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.rope_theta = int(config.head_dim), config.rope_theta
        self.rope_scaling = config.rope_scaling
        self.documents, self.default_core = config.documents, CORES[config.attention]
        self.overrides = AttentionOverrides()
        self._make_matrices(config, device, dtype)

    def _make_matrices(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        linear = partial(Linear, device=device, dtype=dtype)
        kv_dim = self.num_kv_heads * config.head_dim
        q_dim, bias = self.num_heads * config.head_dim, config.qkv_bias
        self.q = linear(config.dim, q_dim, bias)
        self.k = linear(config.dim, kv_dim, bias)
        self.v = linear(config.dim, kv_dim, bias)
        self.o = linear(q_dim, config.dim)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            norm = partial(RMSNorm, config.head_dim, config.norm_eps, device, dtype)
            self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        projected = (self.overrides.project_qkv or self.project_qkv)(x)
        y: Tensor = self.o(self.attend(projected, positions))
        return y

    def attend(self, projected: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Return the input of `o`, the heads' outputs side by side, [B, T, num_heads * head_dim], given q, k and v."""
        q, k, v = projected
        if self.overrides.positions is not None:
            positions = self.overrides.positions(positions)
        cos, sin = rotation(positions, self.head_dim, self.rope_theta, q.dtype, self.rope_scaling)
        q, k = self._heads(q, self.num_heads), self._heads(k, self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = self._heads(v, self.num_kv_heads)
        of_documents = {"positions": positions} if self.documents else {}
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.overrides.cache is not None:
            k, v = self.overrides.cache.extend(k, v)
        out = self.core(q, k, v, causal=True, **of_documents)
        return out.transpose(1, 2).flatten(2)

    @property
    def core(self) -> AttentionCore:
        return self.overrides.core or self.default_core

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return torch.unflatten(x, -1, (num_heads, self.head_dim))
