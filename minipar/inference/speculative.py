"""Speculative decoding: guess several tokens cheaply, verify them in one forward of the model.

Adds to `simple/speculative.py`: drafts by a small model, and a rule that leaves sampled text unchanged too.

A decode step loads all weights from memory for one token. A forward of g + 1 tokens takes hardly longer. So a draft guesses
the next g tokens, the model processes them all, and guesses are kept up to the first wrong one. This is replaced by the
model's own choice, and later guesses are dropped, with their keys and values. A forward gives between 1 and g + 1 new
tokens; if each guess is right with probability a, it gives (1 - a^(g+1)) / (1 - a) on average.

There are two rules for when a guess is right. p is the model's distribution of the token, q the draft's:

same text   The model's own choice is drawn as without a draft, from p and the token's position; the guess is right if it is
            the same token. The text is the one generated without speculation, whatever the draft guesses. A draft that
            draws with the same random numbers as the model agrees with it with probability at least (1 - d) / (1 + d),
            where d is the total variation distance of p and q; one that always guesses x agrees with probability p(x).

rejection   The guess x, drawn from q, is accepted with probability min(1, p(x) / q(x)); after a rejection the token is
            drawn from the residual, max(0, p - q) normalised. Each token has exactly the distribution p:

                q(x) min(1, p(x)/q(x)) + (probability of a rejection) residual(x) = min(q, p) + max(0, p - q) = p

            Guesses are accepted with probability 1 - d, which no rule exceeds. The text depends on the guesses, whose
            number depends on how many rows a step has left; the distribution of texts does not.

At temperature 0, p is 1 for one token, and with both rules the text is the one generated without speculation.

Source: arXiv:2211.17192, algorithm 1 and appendix A.1; arXiv:2302.01318; for the same text, arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minipar.inference.request import Request, distribution
from minipar.model.sampling import NotFinite, choose, uniform
from minipar.model.transformer import Transformer
from minipar.support.errors import require_positive


class Guess(NamedTuple):
    token: int
    q: Tensor | None  # the distribution that it was drawn from, [V]; None: it was not drawn at random


class Draft(Protocol):
    """Guesses the next tokens of a text, as a function of only the text and its request."""

    vocab_size: int | None  # None: it only repeats tokens of the text, so it works with any vocabulary

    def guess(self, text: Sequence[int], request: Request, num_drafts: int, purpose: str) -> list[Guess]: ...


class NGramDraft:
    """Guesses that the text continues as it did after the most recent earlier occurrence of its last n tokens.

    Source: prompt lookup decoding, Saxena, 2023; LLMA, arXiv:2304.04487.
    """

    vocab_size: int | None = None

    def __init__(self, n: int = 2):
        require_positive(n=n)
        self.n = n

    def guess(self, text: Sequence[int], request: Request, num_drafts: int, purpose: str) -> list[Guess]:
        text = list(text)
        for begin in range(len(text) - self.n - 1, -1, -1):
            if text[begin : begin + self.n] == text[-self.n :]:
                after = text[begin + self.n : begin + self.n + num_drafts]
                return [Guess(token, None) for token in after]
        return []


class ModelDraft:
    """Guesses the tokens that a smaller model would generate. It has no cache: each guess is a forward of the whole text.

    The first layers of the model itself are such a model: `ModelDraft(model.stage(range(k), first=True, last=True))`.
    Source of that: LayerSkip, arXiv:2404.16710, section 4.3, for models trained to exit early.
    `check_draft` raises ValueError if its vocabulary differs from that of the model for which it guesses.
    """

    vocab_size: int | None

    def __init__(self, model: Transformer):
        self.model, self.vocab_size = model.eval(), model.config.vocab_size

    @torch.no_grad()
    def guess(self, text: Sequence[int], request: Request, num_drafts: int, purpose: str) -> list[Guess]:
        text, guesses = list(text), []
        for _ in range(num_drafts):
            device = next(self.model.parameters()).device
            window = torch.tensor([text[-self.model.config.max_seq_len :]], device=device)
            try:
                q = distribution(self.model(window)[0, -1], request)
            except NotFinite:  # a guess fewer changes no text
                break
            text.append(choose(q, request.seed, len(text), purpose))
            guesses.append(Guess(text[-1], q))
        return guesses


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raise ValueError if the draft's vocabulary is not the model's."""
    if draft.vocab_size is not None and draft.vocab_size != vocab_size:
        raise ValueError(
            f"the draft has vocab_size={draft.vocab_size}, the model {vocab_size}; use a draft of the same vocabulary"
        )


class Dice(Protocol):
    """The random decisions of `accept_or_resample`, for the token at index i."""

    def accepts(self, i: int, probability: float) -> bool: ...
    def draw(self, i: int, probabilities: Tensor) -> int: ...


class KeyedDice:
    """Decisions that depend only on the seed and the token's position in the text."""

    def __init__(self, seed: int, begin: int):
        self.seed, self.begin = seed, begin

    def accepts(self, i: int, probability: float) -> bool:
        return uniform(1, self.seed, self.begin + i, "accept").item() < probability

    def draw(self, i: int, probabilities: Tensor) -> int:
        return choose(probabilities, self.seed, self.begin + i)


def keep_same_text(p: Sequence[Tensor], guesses: Sequence[Guess], dice: Dice) -> list[int]:
    """Return the new tokens under the rule "same text": the right guesses and one more token.

    p        the model's distributions of the next g + 1 tokens, [V] each: p[i] given the guesses before i
    guesses  g guesses
    """
    written: list[int] = []
    for i, (guessed, _) in enumerate(guesses):
        written.append(dice.draw(i, p[i]))
        if written[-1] != guessed:
            return written
    return [*written, dice.draw(len(guesses), p[len(guesses)])]


def accept_or_resample(p: Sequence[Tensor], guesses: Sequence[Guess], dice: Dice) -> list[int]:
    """Return the new tokens under the rule "rejection": the accepted guesses and one more. Arguments: `keep_same_text`."""
    written: list[int] = []
    for i, (guessed, q) in enumerate(guesses):
        q = torch.zeros_like(p[i]).index_fill_(0, torch.tensor(guessed), 1.0) if q is None else q
        if not dice.accepts(i, acceptance(p[i], q, guessed)):
            return [*written, dice.draw(i, residual(p[i], q))]
        written.append(guessed)
    return [*written, dice.draw(len(guesses), p[len(guesses)])]


def acceptance(p: Tensor, q: Tensor, token: int) -> float:
    """Return the probability of accepting a token drawn from q: min(1, p / q)."""
    return min(1.0, (p[token] / q[token]).item())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution from which the token is drawn after a rejection: max(0, p - q), normalised."""
    rest = (p - q).clamp_min(0.0)
    return rest / rest.sum()


RULES = {"same text": keep_same_text, "rejection": accept_or_resample}
# Under "same text" the draft draws with the model's own random numbers, under "rejection" with independent ones.
DRAWS = {"same text": "token", "rejection": "draft"}


def expected_tokens(acceptance_rate: float, num_drafts: int) -> float:
    """Return the mean number of new tokens per forward: (1 - a^(g+1)) / (1 - a), or g + 1 if a is 1."""
    a, g = acceptance_rate, num_drafts
    return g + 1.0 if a == 1 else (1 - a ** (g + 1)) / (1 - a)
