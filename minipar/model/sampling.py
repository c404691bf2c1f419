"""Text generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minipar.config.model_config import ModelConfig
from minipar.model.cache import caching
from minipar.model.evaluating import evaluating
from minipar.model.transformer import Transformer
from minipar.model.vocabulary import check_vocabulary

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]


@torch.no_grad()
def generate(
    model: Transformer, prompt_tokens: Prompt, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Continue a prompt by `num_tokens` tokens, each chosen by the model's logits given the tokens before it.

    prompt_tokens  [T] or [B, T] int64, T >= 1
    returns        [T + num_tokens] or [B, T + num_tokens]

    temperature 0 takes the most likely token; above 0, tokens are drawn from softmax(logits / temperature) by a
    generator seeded with `seed`. The model sees the last max_seq_len tokens. It processes the prompt once and then one
    token at a time, with a KV cache; see `cache.py` for the cases in which it processes the whole sequence again.
    Raises ValueError on an empty prompt, a token outside the vocabulary, or a negative num_tokens or temperature.
    """
    batch = checked_prompt(model.config, prompt_tokens, num_tokens, temperature)
    generator = torch.Generator().manual_seed(seed)

    def next_token(tokens: Tensor) -> Tensor:
        return choose(model(tokens)[:, -1], temperature, generator)

    if batch.dim() == 1:
        return continue_text(model, batch[None], num_tokens, next_token)[0]
    return continue_text(model, batch, num_tokens, next_token)


def continue_text(
    model: nn.Module, batch: Tensor, num_tokens: int, next_token: Callable[[Tensor], Tensor]
) -> Tensor:
    """Append `num_tokens` tokens to [B, T], each by calling `next_token` on the tokens that are not in the cache yet.

    next_token  [B, new] -> [B, 1]    runs the model, or this stage of it, on the new tokens
    """
    batch = batch.to(next(model.parameters()).device)
    with evaluating(model), caching(model, max_tokens=batch.shape[1] + num_tokens) as cache:
        for _ in range(num_tokens):
            batch = torch.cat((batch, next_token(cache.unread(batch))), dim=1)
    return batch


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose a token for each sample: [B, V] -> [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # Of differences to the maximum, no quotient overflows to inf, however small the temperature.
    below = logits.double() - logits.double().amax(-1, keepdim=True)
    odds = (below / temperature).softmax(-1).cpu()  # on the CPU, every device draws the same tokens
    return torch.multinomial(odds, 1, generator=generator).to(logits.device)


def checked_prompt(config: ModelConfig, prompt_tokens: Prompt, num_tokens: int, temperature: float) -> Tensor:
    """Return the prompt as int64 tokens. Raises ValueError if a model of this config cannot continue it."""
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
