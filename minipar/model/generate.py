"""Let a model write."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt_tokens, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Continue a prompt by `num_tokens` tokens, each read from the model's logits after those before it.

    prompt_tokens  [T] or [B, T] int64, T >= 1
    returns        [T + num_tokens] or [B, T + num_tokens]

    temperature 0 takes the likeliest token; above it, tokens are drawn from softmax(logits / temperature) by a
    generator seeded with `seed`. Each token costs a forward over the last max_seq_len tokens: nothing is cached.
    Raises ValueError on an empty prompt, a token outside the vocabulary or a negative number.
    """
    tokens = torch.as_tensor(prompt_tokens, dtype=torch.int64)
    if tokens.dim() not in (1, 2) or tokens.numel() == 0:
        raise ValueError(
            f"prompt_tokens has shape {tuple(tokens.shape)}; use [T] or [B, T] with at least one token"
        )
    if num_tokens < 0 or temperature < 0:
        raise ValueError(
            f"num_tokens={num_tokens} and temperature={temperature} must not be negative; use 0 or more"
        )
    vocab_size = model.config.vocab_size
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"prompt_tokens range from {tokens.min()} to {tokens.max()}; vocab_size={vocab_size} "
            f"allows 0 to {vocab_size - 1}"
        )
    batch = torch.atleast_2d(tokens).to(next(model.parameters()).device)
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits = model(batch[:, -model.config.max_seq_len :])[:, -1]
            batch = torch.cat((batch, _choose(logits, temperature, generator)), dim=1)
    finally:
        model.train(was_training)
    return batch[0] if tokens.dim() == 1 else batch


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """[B, V] -> [B, 1]"""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    odds = (logits.double() / temperature).softmax(-1).cpu()  # drawn on the CPU: the same on every device
    return torch.multinomial(odds, 1, generator=generator).to(logits.device)
