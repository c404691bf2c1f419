"""A request, and the choice of its next token, which depends only on the request and the tokens before it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.support.errors import require_positive


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it.

    prompt          token ids, at least one
    max_new_tokens  the text ends after this many new tokens, or after the first one that is in `end_tokens`
    temperature     0 takes the most likely token; above 0, tokens are drawn from softmax(logits / temperature)
    top_k           None, or k: draw only from the k most likely tokens
    top_p           draw only from the smallest set of most likely tokens whose probabilities sum to at least this
    seed            seed of the draws; requests with the same prompt but different seeds get different texts
    arrival_s       when the request arrives, in seconds after the service starts

    Raises ValueError, with one line, if a value is out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    end_tokens: frozenset[int] = frozenset()
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _token_ids("prompt", self.prompt))
        object.__setattr__(self, "end_tokens", frozenset(_token_ids("end_tokens", self.end_tokens)))
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token to continue")
        require_positive(max_new_tokens=self.max_new_tokens)
        if self.top_k is not None:
            require_positive(top_k=self.top_k)
        for name in ("temperature", "arrival_s"):
            if not 0 <= (value := _as_float(getattr(self, name))) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}; use a finite number, 0 or more")
            object.__setattr__(self, name, value)
        if not 0 < (top_p := _as_float(self.top_p)) <= 1:
            raise ValueError(f"top_p={self.top_p!r}; use a number above 0, and at most 1")
        object.__setattr__(self, "top_p", top_p)
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise ValueError(f"seed={self.seed!r}; use a whole number")

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of the text, including the prompt."""
        return len(self.prompt) + self.max_new_tokens

    def is_finished_by(self, text: list[int]) -> bool:
        """Return whether `text` is complete. It has the prompt and at least one new token."""
        return len(text) >= self.max_tokens or text[-1] in self.end_tokens


def check_request(request: Request, config: ModelConfig) -> None:
    """Raise ValueError if a model of this config cannot serve the request."""
    if max(request.prompt) >= config.vocab_size:
        raise ValueError(
            f"prompt has token {max(request.prompt)}; vocab_size={config.vocab_size} allows 0 to {config.vocab_size - 1}"
        )
    if request.max_tokens > config.max_seq_len:
        raise ValueError(
            f"{len(request.prompt)} tokens of prompt and max_new_tokens={request.max_new_tokens} exceed "
            f"max_seq_len={config.max_seq_len}; shorten one of them"
        )


def distribution(logits: Tensor, request: Request) -> Tensor:
    """Return the probabilities from which the request's next token is drawn, [V] float64 on the CPU.

    logits  [V]

    At temperature 0 the most likely token has probability 1. Of equally likely tokens, top_k and top_p keep those with
    lower ids, and temperature 0 takes the lowest id.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if request.temperature == 0:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    below = logits - logits.max()  # so that the quotient below cannot be +inf, however small the divisor
    probabilities = (below / request.temperature).softmax(-1)
    if request.top_k is None and request.top_p == 1:
        return probabilities
    sorted_, order = probabilities.sort(descending=True, stable=True)
    before = sorted_.cumsum(-1) - sorted_  # for each token, the total probability of all more likely ones
    dropped = before >= request.top_p
    if request.top_k is not None:
        dropped[request.top_k :] = True
    sorted_[dropped] = 0.0
    kept = torch.zeros_like(probabilities).scatter_(0, order, sorted_)
    return kept / kept.sum()


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


def _token_ids(name: str, tokens: Iterable[int]) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise ValueError(f"{name}={tokens!r}; use a list of token ids")
    for token in (ids := tuple(tokens)):
        if not isinstance(token, Integral) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{name} has {token!r}; use token ids, whole numbers from 0")
    return tuple(int(token) for token in ids)


def _as_float(value: object) -> float:
    """Return a number as a float; nan for what is no number, and inf for one beyond all floats."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
