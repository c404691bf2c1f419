"""A request, and the distribution of its next token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from torch import Tensor

from minipar.config.model_config import ModelConfig
from minipar.model import sampling
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
    """Return the probabilities from which the request's next token is drawn; see `minipar.model.sampling`."""
    return sampling.distribution(logits, request.temperature, request.top_k, request.top_p)


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
