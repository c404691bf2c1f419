"""Text generation, and the choice of a token, which depends only on the logits, the seed and the token's position."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minipar.config.model_config import ModelConfig
from minipar.model.cache import caching
from minipar.model.evaluating import evaluating
from minipar.model.transformer import Transformer
from minipar.model.vocabulary import check_vocabulary

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]

NOT_FINITE = -2  # in place of a token where the logits have nan or inf


class NotFinite(RuntimeError):
    """Logits with nan or inf, from which no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the logits of the next token have nan or inf: weights are damaged, or overflow in this dtype; use another "
            "checkpoint, or a dtype of a wider range"
        )


@torch.no_grad()
def generate(
    model: Transformer, prompt_tokens: Prompt, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Continue a prompt by `num_tokens` tokens, each chosen by the model's logits given the tokens before it.

    prompt_tokens  [T] or [B, T] int64, T >= 1
    returns        [T + num_tokens] or [B, T + num_tokens]

    temperature 0 takes the most likely token; above 0, tokens are drawn from softmax(logits / temperature), as a server
    draws them: row b of a batch has the text of a request with its prompt and seed + b. The model sees the last
    max_seq_len tokens. It processes the prompt once and then one token at a time, with a KV cache; see `cache.py` for the
    cases in which it processes the whole sequence again.
    Raises ValueError on an empty prompt, a token outside the vocabulary, or a negative num_tokens or temperature;
    NotFinite, a RuntimeError, if a row's logits have nan or inf.
    """
    batch = checked_prompt(model.config, prompt_tokens, num_tokens, temperature)

    def next_token(tokens: Tensor, position: int) -> Tensor:
        return choose_rows(model(tokens)[:, -1], temperature, seed, position)

    if batch.dim() == 1:
        return continue_text(model, batch[None], num_tokens, next_token)[0]
    return continue_text(model, batch, num_tokens, next_token)


def continue_text(
    model: nn.Module, batch: Tensor, num_tokens: int, next_token: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Append `num_tokens` tokens to [B, T], each by calling `next_token` on the tokens that are not in the cache yet.

    next_token  ([B, new], position) -> [B, 1]    runs the model, or this stage of it, on the new tokens

    Raises NotFinite if no token can be chosen.
    """
    batch = batch.to(next(model.parameters()).device)
    with evaluating(model), caching(model, max_tokens=batch.shape[1] + num_tokens) as cache:
        for _ in range(num_tokens):
            tokens = next_token(cache.unread(batch), batch.shape[1])
            if (tokens == NOT_FINITE).any():
                raise NotFinite
            batch = torch.cat((batch, tokens), dim=1)
    return batch


def choose_rows(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Choose a token for each row, [B, V] -> [B, 1], with seed + b for row b; NOT_FINITE for logits with nan or inf."""
    if temperature == 0:
        return likeliest_tokens(logits)[:, None]
    tokens = []
    for row, of_row in enumerate(logits):
        try:
            tokens.append(choose(distribution(of_row, temperature), seed + row, position))
        except NotFinite:
            tokens.append(NOT_FINITE)
    return torch.tensor(tokens, device=logits.device)[:, None]


def distribution(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Return the probabilities from which the next token is drawn, [V] float64 on the CPU.

    logits  [V]
    top_k   None, or k: draw only from the k most likely tokens
    top_p   draw only from the smallest set of most likely tokens whose probabilities sum to at least this

    At temperature 0 the most likely token has probability 1. Of equally likely tokens, top_k and top_p keep those with
    lower ids, and temperature 0 takes the lowest id.
    Raises NotFinite for nan, of which the largest logit would be one, and for inf.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if not logits.isfinite().all():
        raise NotFinite
    if temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    below = logits - logits.max()  # so that the quotient below cannot be +inf, however small the divisor
    probabilities = (below / temperature).softmax(-1)
    if top_k is None and top_p == 1:
        return probabilities
    sorted_, order = probabilities.sort(descending=True, stable=True)
    before = sorted_.cumsum(-1) - sorted_  # for each token, the total probability of all more likely ones
    dropped = before >= top_p
    if top_k is not None:
        dropped[top_k:] = True
    sorted_[dropped] = 0.0
    kept = torch.zeros_like(probabilities).scatter_(0, order, sorted_)
    return kept / kept.sum()


def likeliest_tokens(logits: Tensor) -> Tensor:
    """Return the token of each row, [n, V] -> [n], at temperature 0; NOT_FINITE for a row with nan or inf."""
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), NOT_FINITE)


def choose(probabilities: Tensor, seed: int, position: int, purpose: str = "token") -> int:
    """Draw a token from `probabilities`, [V] float64, as a function of the seed and the token's position in the text.

    Each token i gets a time E_i / p_i, where E_i is exponential with mean 1, and the token with the smallest time is
    chosen: token i with probability p_i. The E_i depend only on (seed, position, purpose), not on p. So the same token is
    drawn in every batch, and similar distributions, such as a model's and its draft's, mostly give the same token.

    Source of drawing with common E_i: Daliri, Musco and Suresh, arXiv:2408.07978, section 3.
    """
    waits = -torch.log1p(-uniform(len(probabilities), seed, position, purpose))
    return int((probabilities / waits.clamp_min(1e-300)).argmax())


def uniform(size: int, seed: int, position: int, purpose: str) -> Tensor:
    """Return `size` float64 random numbers, uniform in [0, 1), which are a function of the arguments."""
    digest = hashlib.blake2b(f"{seed} {position} {purpose}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.rand(size, dtype=torch.float64, generator=generator)


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
