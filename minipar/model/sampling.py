"""Text generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minipar.model.cache import caching
from minipar.model.model_config import ModelConfig
from minipar.model.vocabulary import check_vocabulary


@torch.no_grad()
def generate(
    model: nn.Module, prompt_tokens, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Continue a prompt by `num_tokens` tokens, each chosen from the model's logits for the tokens before it.

    prompt_tokens  [T] or [B, T] int64, T >= 1
    returns        [T + num_tokens] or [B, T + num_tokens]

    temperature 0 takes the likeliest token; above it, tokens are drawn from softmax(logits / temperature) by a
    generator seeded with `seed`. The model sees the last max_seq_len tokens. It reads the prompt once and then one
    token at a time, with cached keys and values; see `cache.py` for the cases in which it reads the text anew.
    Raises ValueError on an empty prompt, a token outside the vocabulary, or a negative num_tokens or temperature.
    """
    batch = checked_prompt(model.config, prompt_tokens, num_tokens, temperature)
    generator = torch.Generator().manual_seed(seed)
    next_token = lambda tokens: choose(model(tokens)[:, -1], temperature, generator)  # noqa: E731
    text = continue_text(model, torch.atleast_2d(batch), num_tokens, next_token)
    return text[0] if batch.dim() == 1 else text


def continue_text(
    model: nn.Module, batch: Tensor, num_tokens: int, next_token: Callable[[Tensor], Tensor]
) -> Tensor:
    """Append `num_tokens` tokens to [B, T], each by calling `next_token` on the tokens that `model` has not read yet.

    next_token  [B, new] -> [B, 1]    runs the model, or this stage of it, on them
    """
    batch = batch.to(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        with caching(model, max_tokens=batch.shape[1] + num_tokens) as cache:
            for _ in range(num_tokens):
                batch = torch.cat((batch, next_token(cache.unread(batch))), dim=1)
    finally:
        model.train(was_training)
    return batch


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose a token for each sample: [B, V] -> [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    odds = (logits.double() / temperature).softmax(-1).cpu()  # drawn on the CPU: the same on every device
    return torch.multinomial(odds, 1, generator=generator).to(logits.device)


def checked_prompt(config: ModelConfig, prompt_tokens, num_tokens: int, temperature: float) -> Tensor:
    """Return the prompt as int64 tokens. Raises ValueError where a model of this config cannot continue it."""
    tokens = torch.as_tensor(prompt_tokens, dtype=torch.int64)
    if tokens.dim() not in (1, 2) or tokens.numel() == 0:
        raise ValueError(
            f"prompt_tokens has shape {tuple(tokens.shape)}; use [T] or [B, T] with at least one token"
        )
    if num_tokens < 0 or temperature < 0:
        raise ValueError(
            f"num_tokens={num_tokens} and temperature={temperature} must not be negative; use 0 or more"
        )
    check_vocabulary("prompt_tokens", tokens, config.vocab_size)
    return tokens
