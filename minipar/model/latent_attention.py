"""Multi-head latent attention (MLA): all heads' keys and values are computed from one narrow latent per token.

For every new token, generation reads the cache of all earlier tokens. So the size of a token's cache decides how many
requests fit and how fast they are. Grouped queries cache fewer keys and values. MLA caches neither keys nor values, only
the latent and the rotary key from which they are computed:

    c     = norm(W_DKV x)            [kv_latent_dim]       the latent, shared by all heads
    k_R   = rotate(W_KR x)           [rope_dim]            the rotary key, shared by all heads
    k_h   = (W_UK,h c, k_R)          [head_dim + rope_dim]
    v_h   = W_UV,h c                 [head_dim]
    q_h   = (W_Q,h x, rotate(W_QR,h x))
    out_h = sum over tokens of softmax(q_h . k_h / sqrt(head_dim + rope_dim)) v_h

The cache holds (c, k_R) for each token and layer. Since W_UK is linear, it can be applied to the query instead of the keys,
and W_UV to the result instead of the values, so that attention runs directly on the cache:

    q_h . k_h               = (W_UK,h^T q_h) . c + q_R,h . k_R
    sum of weights W_UV,h c = W_UV,h (sum of weights c)

These are the *absorbed* matrices: multi-query attention with one key/value head of width kv_latent_dim + rope_dim. This
works only if the latent is not rotated: a rotation between q_h and W_UK,h would differ for each pair of tokens, so W_UK,h
could not be applied to the query once. So rotary features are separate, and all heads share those of the key.

The paper also compresses queries, which saves activations in training but nothing in the cache; that is left out here.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C; the norm of the latent, section 3.1.2.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from minipar.config.model_config import ModelConfig
from minipar.model.attention import Attention
from minipar.model.deferrable_linear import Linear
from minipar.model.norm import RMSNorm
from minipar.model.rope import rotate, rotation


class LatentAttention(Attention):
    """Self-attention with keys and values computed from a latent. With d = head_dim, c = kv_latent_dim, r = rope_dim:

    x, y     [B, T, D]
    q        [B, T, num_heads * (d + r)]    for each head, d features, then r that are rotated
    latents  [B, T, c + r]                  the normed latent, then the rotary key, not yet rotated

    q.weight        [num_heads * (d + r), D]     W_Q and W_QR of each head
    kv_down.weight  [c, D]                       W_DKV
    kv_norm.weight  [c]
    k_rope.weight   [r, D]                       W_KR
    k_up.weight     [num_heads * d, c]           W_UK
    v_up.weight     [num_heads * d, c]           W_UV
    o.weight        [D, num_heads * d]

    Training uses the plain form; `overrides.absorbed` selects the absorbed form, which is equal up to rounding. A score
    then costs c + r multiplications instead of d + r, but no keys and values are computed. A prompt is cheaper in the plain
    form, a decode step in the absorbed one; generation uses the absorbed form for both.

    Every core, also under context parallelism, takes q, k and v of one width. So in the plain form v is padded with r
    zeros, and the core's output is cut to d.
    """

    def _make_matrices(self, config: ModelConfig, device: Device, dtype: torch.dtype | None) -> None:
        linear = partial(Linear, device=device, dtype=dtype)
        self.latent_dim, self.rope_dim = config.kv_latent_dim, config.rope_dim
        heads_dim = config.num_heads * config.head_dim
        self.q = linear(config.dim, config.num_heads * (config.head_dim + config.rope_dim))
        self.kv_down = linear(config.dim, config.kv_latent_dim)
        self.kv_norm = RMSNorm(config.kv_latent_dim, config.norm_eps, device, dtype)
        self.k_rope = linear(config.dim, config.rope_dim)
        self.k_up = linear(config.kv_latent_dim, heads_dim)
        self.v_up = linear(config.kv_latent_dim, heads_dim)
        self.o = linear(heads_dim, config.dim)

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.latents(x)

    def latents(self, x: Tensor) -> Tensor:
        """Return each token's normed latent and its rotary key before rotation, [B, T, c + r]."""
        return torch.cat((self.kv_norm(self.kv_down(x)), self.k_rope(x)), dim=-1)

    def attend(self, projected: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Return the input of `o`, the heads' outputs side by side, [B, T, num_heads * head_dim], given q and latents."""
        q, latents = projected
        if self.overrides.positions is not None:
            positions = self.overrides.positions(positions)
        cos, sin = rotation(positions, self.rope_dim, self.rope_theta, q.dtype, self.rope_scaling)
        q = torch.unflatten(q, -1, (self.num_heads, self.head_dim + self.rope_dim))
        q, q_rope = q.split((self.head_dim, self.rope_dim), dim=-1)
        latent, k_rope = latents.split((self.latent_dim, self.rope_dim), dim=-1)
        q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope.unsqueeze(-2), cos, sin)
        of_documents = {"positions": positions} if self.documents else {}
        form = self._absorbed if self.overrides.absorbed else self._plain
        return form(q, q_rope, latent, k_rope, of_documents)

    def _plain(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, of_documents: dict[str, Tensor]
    ) -> Tensor:
        """Compute each head's keys and values, and attention over these.

        q  [B, T, H, d]    q_rope  [B, T, H, r]    latent  [B, T, c]    k_rope  [B, T, 1, r]
        """
        k, v = self._heads(self.k_up(latent), self.num_heads), self._heads(self.v_up(latent), self.num_heads)
        q = torch.cat((q, q_rope), dim=-1).transpose(1, 2)
        k = torch.cat((k, k_rope.expand_as(q_rope)), dim=-1).transpose(1, 2)
        v = F.pad(v, (0, self.rope_dim)).transpose(1, 2)
        if self.overrides.cache is not None:
            k, v = self.overrides.cache.extend(k, v)
        out = self.core(q, k, v, causal=True, **of_documents)[..., : self.head_dim]
        return out.transpose(1, 2).flatten(2)

    def _absorbed(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, of_documents: dict[str, Tensor]
    ) -> Tensor:
        """Compute attention over the latents, which are the keys and values of one head that all queries share."""
        k_up, v_up = (self._heads_of(matrix.weight) for matrix in (self.k_up, self.v_up))
        q = torch.cat((torch.einsum("bthd,hdc->bthc", q, k_up), q_rope), dim=-1).transpose(1, 2)
        # The core divides scores by sqrt(c + r), where the plain form divides by sqrt(d + r).
        q = q * math.sqrt((self.latent_dim + self.rope_dim) / (self.head_dim + self.rope_dim))
        k = v = torch.cat((latent.unsqueeze(-2), k_rope), dim=-1).transpose(1, 2)
        if self.overrides.cache is not None:
            k, v = self.overrides.cache.extend(k, v)
        out = self.core(q, k, v, causal=True, **of_documents)[..., : self.latent_dim]  # [B, H, T, c]
        return torch.einsum("bhtc,hdc->bthd", out, v_up).flatten(2)

    def _heads_of(self, weight: Tensor) -> Tensor:
        return torch.unflatten(weight, 0, (self.num_heads, self.head_dim))
