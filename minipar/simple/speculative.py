"""Speculative decoding: guess several tokens cheaply, verify them all in one pass of the model, keep those that are right.

A pass over one token reads all weights, and a pass over g + 1 tokens hardly takes longer. p is the model's distribution of
a token, q that of the guess:

    accept the guess x with probability min(1, p(x) / q(x));  at the first rejection, draw from max(0, p - q), normalised

    q(x) min(1, p(x)/q(x))  +  P(rejection) max(0, p - q)(x) / P(rejection)   =   min(q, p) + max(0, p - q)   =   p(x)

So the text is distributed exactly as if the model had generated it without guesses. At temperature 0 it is the same
text. A wrong guess, and all guesses after it, must leave the cache.

In the library: minipar.inference, speculative.py, which adds small models as drafts, and a rule that leaves sampled text
unchanged too.
Source: Leviathan, Kalman and Matias, arXiv:2211.17192, algorithm 1.
"""

import torch

from .generate import Cache, blocks_of, set_cores, whole_logits


class Dice:
    """The random decisions, here made with a generator; a test may replace them and take every branch."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def accepts(self, i, probability):
        return torch.rand(1, generator=self.generator).item() < probability

    def draw(self, i, p):
        return torch.multinomial(p, 1, generator=self.generator).item()


def accept_or_resample(p, guesses, dice):
    """Return the tokens to append: the accepted guesses, and one more.   p [g + 1, V]   guesses: g of (token, q [V])"""
    written = []
    for i, (token, q) in enumerate(guesses):
        if not dice.accepts(i, min(1.0, (p[i][token] / q[token]).item())):
            rest = (p[i] - q).clamp_min(0.0)
            return [*written, dice.draw(i, rest / rest.sum())]
        written.append(token)
    return [*written, dice.draw(len(guesses), p[len(guesses)])]


def guess_by_repetition(text, num_guesses, vocab_size):
    """Guess, with probability 1, that the text continues as it did after the last earlier occurrence of its last token."""
    earlier = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
    after = text[earlier[-1] + 1 :][:num_guesses] if earlier else []
    return [(token, torch.eye(vocab_size, dtype=torch.float64)[token]) for token in after]


@torch.no_grad()
def speculate(groups, model, prompt, num_tokens, num_guesses=4, temperature=0.0, seed=0):
    """Return `num_tokens` new tokens, and the number of passes they took."""
    text, dice, num_passes = list(prompt), Dice(seed), 0
    vocab_size = len(model[-1].head) * groups.tp.size
    caches, num_read = [Cache() for _ in blocks_of(model)], 0
    set_cores(model, caches)
    while (left := num_tokens - (len(text) - len(prompt))) > 0:
        guesses = guess_by_repetition(text, min(num_guesses, left - 1), vocab_size)
        unread = text[num_read:] + [token for token, _ in guesses]
        logits = whole_logits(groups, model(torch.tensor([unread]))[0, -len(guesses) - 1 :])
        text += accept_or_resample(probabilities(logits, temperature), guesses, dice)
        num_passes, num_read = num_passes + 1, len(text) - 1
        for cache in caches:
            cache.cut(num_read)
    set_cores(model, [None] * len(caches))
    return text[len(prompt) :], num_passes


def probabilities(logits, temperature):
    """[N, V] -> [N, V]; at temperature 0, the likeliest token has probability 1"""
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return (logits / temperature).softmax(-1)
