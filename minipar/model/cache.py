"""Key/value cache: during generation a model reads each token once.

Causal attention needs only the keys and values of earlier tokens, which do not change when text is appended. With
these cached, the next token costs the layers' products for one token, and attention over the S tokens before it: linear
in S, where reading the whole text again costs S times the products and S^2 of attention. The cache holds
2 * batch * num_kv_heads * head_dim elements per token and layer; grouped queries make this small.

In two cases nothing can be cached, and the text is read anew for every token:

the window slides   Of a text longer than max_seq_len, the model reads the last max_seq_len tokens, the first of them at
                    position 0. All positions change with every token, and so do all keys.
experts are full    Where a mixture drops tokens (capacity_factor is a number), whether one is dropped can depend on
                    all tokens of its group, later ones too, and so can the keys of the layers above. Without a
                    capacity each token is routed alone, and its keys and values can be cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minipar.model.attention import Attention
from minipar.model.transformer import Transformer


class KeyValueCache:
    """The keys and values that one attention has computed so far, in the order of the tokens; at most `max_tokens` tokens.

    An attention that is sharded over tp caches the heads that it computes.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens, self.length = max_tokens, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the next T tokens' values and already rotated keys; return those of all S tokens so far.

        k, v    [B, H/g, T, head_dim]    returned [B, H/g, S, head_dim], views that are valid until the next call
        """
        if self._keys is None:
            B, heads, _, head_dim = k.shape
            self._keys, self._values = (x.new_empty(B, heads, self.max_tokens, head_dim) for x in (k, v))
        begin, self.length = self.length, self.length + k.shape[2]
        assert self.length <= self.max_tokens, f"{self.length} tokens in a cache for {self.max_tokens}"
        self._keys[:, :, begin : self.length] = k
        self._values[:, :, begin : self.length] = v
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def clear(self) -> None:
        self.length = 0


class GenerationCache:
    """The number of tokens that a model, or a stage of it, has read, and the keys and values of its attentions."""

    def __init__(self, model: Transformer, key_values: list[KeyValueCache]):
        self.max_seq_len, self.key_values = model.config.max_seq_len, key_values
        self.is_usable = not model.config.num_experts or model.config.capacity_factor is None

    @property
    def length(self) -> int:
        """The number of tokens read so far."""
        return self.key_values[0].length

    def unread(self, tokens: Tensor) -> Tensor:
        """Return the tokens that the model has yet to read of this text, which continues the text of the last call.

        tokens  [B, S]    returned [B, T]: the new tokens, or the whole window where nothing can be cached
        """
        if not self.is_usable or tokens.shape[1] > self.max_seq_len:
            for layer in self.key_values:
                layer.clear()
        return tokens[:, -self.max_seq_len :][:, self.length :]

    def positions(self, num_tokens: int, device) -> Tensor:
        """Return the positions of the next tokens, [num_tokens]."""
        return torch.arange(self.length, self.length + num_tokens, device=device)


@contextmanager
def caching(model: nn.Module, max_tokens: int) -> Iterator[GenerationCache]:
    """Return a context in which the model caches keys and values: call the model on `cache.unread(tokens)`.

    max_tokens  the number of tokens to cache at most; more than max_seq_len are never needed

    Every attention inside caches 2 * B * (its key/value heads) * head_dim * max_tokens elements, freed on exit.
    Raises ValueError under context parallelism, where the model reads a part of each sample, and inside another `caching`.
    """
    transformer = next(m for m in model.modules() if isinstance(m, Transformer))
    if transformer.overrides.default_positions is not None:
        raise ValueError(
            "default_positions has been replaced: this model reads a part of every sample (context parallelism) or is "
            "writing already; use one that reads all of it"
        )
    attentions = [m for m in transformer.modules() if isinstance(m, Attention)]
    cache = GenerationCache(
        transformer, [KeyValueCache(min(max_tokens, transformer.config.max_seq_len)) for _ in attentions]
    )
    for attention, layer in zip(attentions, cache.key_values):
        attention.overrides.cache = layer
    transformer.overrides.default_positions = cache.positions
    try:
        yield cache
    finally:
        for attention in attentions:
            attention.overrides.cache = None
        transformer.overrides.default_positions = None
