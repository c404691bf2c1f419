"""Text generation: each token is processed once, because its keys and values are cached.

    prefill the prompt, T tokens -> logits of its last token -> token T -> decode token T alone -> token T+1 -> ...

From earlier tokens, causal attention needs only keys and values, which no later token changes. Without the cache, every new
token would cost a pass over the whole sequence. With it, a new token costs a pass over one token, and the cache holds
2 * DIM elements per token and layer.

Under tp, each rank caches its own heads; the logits of the last token are gathered, and every rank chooses the same token.

In the library: minipar.model.generate, which adds grouped queries, rotary positions, temperatures and windows that slide.
"""

import torch
import torch.nn.functional as F

from .transformer import Block


class Cache:
    """Attention of one layer that keeps the keys and values of all tokens processed so far, [B, heads, S, head_dim]."""

    def __init__(self):
        self.k = self.v = None

    def __call__(self, q, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v = k, v
        return attend(q, k, v)

    def cut(self, length):
        """Forget all tokens but the first `length`."""
        self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]


def attend(q, k, v):
    """Causal attention of the last T of S tokens: query i sees keys 0 ... S-T+i.   q [B, h, T, d]   k, v [B, h, S, d]"""
    T, S = q.shape[2], k.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, S).tril(S - T).bool())


def blocks_of(model):
    return [layer for layer in model if isinstance(layer, Block)]


def set_cores(model, cores):
    """Give each layer its own core, which computes its attention; return the model."""
    for block, core in zip(blocks_of(model), cores):
        block.core = core
    return model


def whole_logits(groups, logits):
    """Gather logits that are sharded over tp.   [N, V/tp] -> [N, V]"""
    return groups.tp.all_gather(logits.t().contiguous()).t()


@torch.no_grad()
def generate(groups, model, prompt, num_tokens):
    """Return `num_tokens` tokens after the prompt, each the likeliest one given all tokens before it."""
    text, unread = list(prompt), list(prompt)
    set_cores(model, [Cache() for _ in blocks_of(model)])
    for _ in range(num_tokens):
        logits = model(torch.tensor([unread]))[:, -1]
        unread = whole_logits(groups, logits).argmax(-1).tolist()
        text += unread
    set_cores(model, [None] * len(blocks_of(model)))
    return text[len(prompt) :]
