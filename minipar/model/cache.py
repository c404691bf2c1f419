"""KV cache: during generation the model processes each token once.

Causal attention needs only the keys and values of earlier tokens, which do not change when tokens are appended. If they are
cached, the next token costs the layers' matrix products for one token, and attention over the S tokens before it, which
is linear in S. Without a cache it costs the products for S tokens, and attention quadratic in S. The cache holds
2 * batch * num_kv_heads * head_dim elements per token and layer; grouped queries make this small, and latent attention
caches batch * (kv_latent_dim + rope_dim).

In two cases nothing can be cached, and the whole sequence is processed again for every token:

the window slides   If a sequence is longer than max_seq_len, the model gets its last max_seq_len tokens and counts
                    positions from the first of these. With every new token all positions change, and so do all keys.
experts are full    If an MoE layer drops tokens (capacity_factor is a number), whether a token is dropped can depend on
                    all tokens of its group, even later ones, and so can its keys in the layers above. Without a
                    capacity each token is routed independently, and its keys and values can be cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minipar.model.attention import Attention
from minipar.model.latent_attention import LatentAttention
from minipar.model.transformer import Transformer


class KeyValueCache:
    """The keys and values that one attention module has computed so far, in token order, for at most `max_tokens` tokens.

    With tensor parallelism, each rank caches the heads that it computes.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens, self.length = max_tokens, 0
        self._memory: tuple[Tensor, Tensor] | None = None  # one for keys, one for values

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys (already rotated) and values of the next T tokens; return keys and values of all S tokens so far.

        k, v     [B, H/g, T, head_dim]
        returns  [B, H/g, S, head_dim] each: views that are valid until the next call
        """
        if self._memory is None:
            of_keys, of_values = ((*x.shape[:2], self.max_tokens, x.shape[3]) for x in (k, v))
            self._memory = k.new_empty(of_keys), v.new_empty(of_values)
        keys, values = self._memory
        begin, self.length = self.length, self.length + k.shape[2]
        assert self.length <= self.max_tokens, f"{self.length} tokens in a cache for {self.max_tokens}"
        keys[:, :, begin : self.length] = k
        values[:, :, begin : self.length] = v
        return keys[:, :, : self.length], values[:, :, : self.length]

    def clear(self) -> None:
        self.length = 0


class LatentCache(KeyValueCache):
    """The latents of one `LatentAttention`: keys and values are the same tensor, which is stored once.

    With tensor parallelism, each rank caches all of them, since every head uses every latent.
    """

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append latents [B, 1, T, c + r], given as both k and v; return all latents so far, as keys and as values."""
        latents, _ = super().extend(k, v[..., :0])
        return latents, latents


class GenerationCache:
    """The number of tokens that a model or a stage has processed, and the caches of its attention modules."""

    def __init__(self, model: Transformer, key_values: list[KeyValueCache]):
        self.max_seq_len, self.key_values = model.config.max_seq_len, key_values
        self.is_usable = not model.config.num_experts or model.config.capacity_factor is None

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self.key_values[0].length

    def unread(self, tokens: Tensor) -> Tensor:
        """Return the tokens that are not in the cache; `tokens` must begin with the tokens of the last call.

        tokens   [B, S]
        returns  [B, T]    the new tokens, or the whole window if nothing can be cached
        """
        if not self.is_usable or tokens.shape[1] > self.max_seq_len:
            for layer in self.key_values:
                layer.clear()
        return tokens[:, -self.max_seq_len :][:, self.length :]

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the next tokens, [num_tokens]."""
        return torch.arange(self.length, self.length + num_tokens, device=device)


@contextmanager
def caching(model: nn.Module, max_tokens: int) -> Iterator[GenerationCache]:
    """Make a context in which the model caches keys and values: call the model on `cache.unread(tokens)`.

    max_tokens  maximum number of tokens to cache; more than max_seq_len are never needed

    Each attention module caches 2 * B * (its key/value heads) * head_dim * max_tokens elements, and latent attention
    B * (kv_latent_dim + rope_dim) * max_tokens. They are freed on exit.
    Raises ValueError under context parallelism, where a rank gets only a part of each sample, and inside another `caching`.
    """
    transformer = next(m for m in model.modules() if isinstance(m, Transformer))
    if transformer.overrides.default_positions is not None:
        raise ValueError(
            "default_positions has been replaced: this model reads a part of every sample (context parallelism) or is "
            "writing already; use one that reads all of it"
        )
    attentions = [m for m in transformer.modules() if isinstance(m, Attention)]
    max_tokens = min(max_tokens, transformer.config.max_seq_len)
    kinds = [LatentCache if isinstance(a, LatentAttention) else KeyValueCache for a in attentions]
    cache = GenerationCache(transformer, [kind(max_tokens) for kind in kinds])
    for attention, layer in zip(attentions, cache.key_values):
        attention.overrides.cache, attention.overrides.absorbed = layer, True
    transformer.overrides.default_positions = cache.positions
    try:
        yield cache
    finally:
        for attention in attentions:
            attention.overrides.cache, attention.overrides.absorbed = None, False
        transformer.overrides.default_positions = None
