"""Specification of speculative decoding: its exact distribution, found by taking every branch of each random decision.

Let the draft guess g tokens. Each combination of guesses and random decisions gives an output sequence, whose weight is
the probability of the guesses under q times the probabilities of the decisions. An output shorter than g + 1 tokens is
continued by the model. For every sequence of g + 1 tokens, the weights must sum to the model's own probability of it, up to
the rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from minipar.spec.from_file import Implementation
from minipar.spec.specification import Specification, Stage, StageName
from minipar.spec.varied import FLOAT32, PLAIN, STRIDED, Kind
from minipar.spec.words import Wrong, first, generator, wrong_entries

TINY = 1e-14  # branches of a lower probability are not taken
ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}

Text = tuple[int, ...]


class Branch:
    """Dice that decide as `path` says, then always take the first possible branch; `others` lists those not taken."""

    def __init__(self, path: tuple[int, ...], vocab_size: int, num_guesses: int):
        self.path, self.vocab_size, self.num_guesses = path, vocab_size, num_guesses
        self.taken: list[int] = []
        self.others: list[tuple[int, ...]] = []
        self.asked: set[tuple[str, int]] = set()
        self.weight = 1.0

    def accepts(self, i: int, probability: float) -> bool:
        self._note("accepts", i, self.num_guesses - 1)
        accepted = min(1.0, max(0.0, float(probability)))
        return self._decide([1.0 - accepted, accepted]) == 1

    def draw(self, i: int, p: Tensor) -> int:
        self._note("draw", i, self.num_guesses)
        numbers = torch.as_tensor(p).double()
        if numbers.shape != (self.vocab_size,):
            raise Wrong(f"dice.draw({i}, p) got p {list(numbers.shape)}; it should be [{self.vocab_size}]")
        if not (numbers >= 0).all():
            raise Wrong(f"dice.draw({i}, p) got a p with negative numbers or nan: {_short(numbers)}")
        if abs(total := numbers.sum().item() - 1) > 1e-4:
            raise Wrong(f"dice.draw({i}, p) got numbers that add up to {total + 1:.4g}; it should be 1")
        return self._decide(numbers.tolist())

    def _note(self, name: str, i: int, last: int) -> None:
        if not 0 <= i <= last:
            raise Wrong(f"dice.{name} was asked for index {i}; the last is {last}")
        if (name, i) in self.asked:
            raise Wrong(f"dice.{name} was asked twice for index {i}; its numbers belong to the index")
        self.asked.add((name, i))

    def _decide(self, weights: list[float]) -> int:
        n = len(self.taken)
        ways = [way for way, weight in enumerate(weights) if weight > TINY]
        way = self.path[n] if n < len(self.path) else ways[0]
        if n >= len(self.path):
            self.others += [(*self.taken, other) for other in ways[1:]]
        self.taken.append(way)
        self.weight *= weights[way]
        return way


class Case:
    """A model and a draft over `vocab_size` tokens: distributions of the next token after every prefix, and g guesses."""

    def __init__(self, vocab_size: int, num_guesses: int, seed: int, kind: Kind = PLAIN, sharp: str = ""):
        self.vocab_size, self.num_guesses, self.kind, self.sharp = vocab_size, num_guesses, kind, sharp
        self.seed = seed
        self.p = cache(partial(self._distribution, 0))
        self.q = cache(partial(self._distribution, 1))
        self.law = cache(self._law)

    def _distribution(self, who: int, text: Text) -> Tensor:
        who = 0 if self.sharp == "equal" else who
        draw = generator(self.vocab_size, self.seed, who, *text)
        logits = 2 * torch.randn(self.vocab_size, generator=draw, dtype=torch.float64)
        if self.sharp == "certain":
            logits = torch.where(logits == logits.max(), 0.0, -torch.inf)
        if self.sharp == "zeros":
            logits[int(torch.randint(self.vocab_size, (1,), generator=draw))] = -torch.inf
        return logits.softmax(0).to(self.kind.dtype)

    def _law(self, text: Text) -> Tensor:
        """Return the model's probability of each continuation of `text` to g + 1 tokens, [V, V, ...]."""
        if len(text) == self.num_guesses + 1:
            return torch.ones((), dtype=torch.float64)
        p = self.p(text).double()
        return torch.stack([p[token] * self.law((*text, token)) for token in range(self.vocab_size)])

    def __str__(self) -> str:
        kind = f", {self.kind.words}" if self.kind.words else ""
        sharp = {"equal": ", p = q", "certain": ", p and q certain", "zeros": ", zeros in p and q", "": ""}
        guesses = "1 guess" if self.num_guesses == 1 else f"{self.num_guesses} guesses"
        return f"V = {self.vocab_size}, {guesses}{sharp[self.sharp]}{kind}"


def _right(rule: Implementation, case: Case) -> str | None:
    V, g = case.vocab_size, case.num_guesses
    found, num_written = torch.zeros([V] * (g + 1), dtype=torch.float64), 0.0
    for guessed in product(range(V), repeat=g):
        q = [case.q(guessed[:i]) for i in range(g)]
        likely = prod(x[token].item() for x, token in zip(q, guessed))
        if likely < TINY:
            continue
        p = torch.stack([case.p(guessed[:i]) for i in range(g + 1)])
        for written, weight in _texts(rule, p, q, guessed, case):
            if not isinstance(written, list | tuple) or not 1 <= len(written) <= g + 1:
                return f"{case}: it returned {written!r}; return a list of 1 to {g + 1} tokens"
            text = tuple(int(token) for token in written)
            if not all(0 <= token < V for token in text):
                return f"{case}: it returned {written!r}; tokens are 0 to {V - 1}"
            found[text] += likely * weight * case.law(text)
            num_written += likely * weight * len(text)
    allowed = ALLOWED[case.kind.dtype]
    if wrong_entries(found, case.law(()), allowed).any():
        return _difference(found, case, allowed)
    most = _most_written(case, ())
    if num_written < most - 10 * allowed * (g + 1):
        return (
            f"{case}: the distribution is right, but a pass writes {num_written:.4g} tokens on average; accepting "
            f"with min(1, p/q) writes {most:.4g}"
        )
    return None


def _texts(
    rule: Implementation, p: Tensor, q: list[Tensor], guessed: Text, case: Case
) -> Iterator[tuple[Any, float]]:
    """Yield the tokens generated for these guesses in each branch of the dice, and the branch's probability."""
    paths: list[tuple[int, ...]] = [()]
    while paths:
        dice = Branch(paths.pop(), case.vocab_size, case.num_guesses)
        guesses = [(token, case.kind.given(x)) for token, x in zip(guessed, q)]
        written = rule(case.kind.given(p), guesses, dice)
        if not dice.taken and case.vocab_size > 1:
            raise Wrong("the dice were not asked; ask dice.accepts and dice.draw")
        paths += dice.others
        yield written, dice.weight


def _difference(found: Tensor, case: Case, allowed: float) -> str:
    """Describe a token whose probability is wrong: the first one after the shortest prefix that has one."""
    for n in range(found.dim()):
        got, want = (x.reshape(*x.shape[: n + 1], -1).sum(-1) for x in (found, case.law(())))
        wrong = wrong_entries(got, want, allowed).nonzero()
        if len(wrong):
            *text, token = wrong[0].tolist()
            after = f" after {text}" if text else ""
            got_p, want_p = got[(*text, token)].item(), want[(*text, token)].item()
            of = (
                f", p = {_short(case.p(()))}, q = {_short(case.q(()))}" if n == 0 and case.num_guesses else ""
            )
            return (
                f"{case}{of}: token {token} comes {'first' if n == 0 else f'as number {n}'}{after} with probability "
                f"{got_p:.9g}, it should be {want_p:.9g}{_cause(got, case) if n == 0 else ''}"
            )
    return ""


def _cause(first_token: Tensor, case: Case) -> str:
    if not case.num_guesses:
        return ""
    p, q = case.p(()).double(), case.q(()).double()
    kept = torch.minimum(p, q)
    causes = {
        "the guess is kept whatever the model says": q,
        "after a rejection it is drawn from p, not from max(0, p - q)": kept + (1 - kept.sum()) * p,
        "after a rejection it is drawn from q": kept + (1 - kept.sum()) * q,
    }
    for words, law in causes.items():
        if (first_token - law).abs().max() < 1e-6:
            return f": {words}"
    return ""


def _most_written(case: Case, text: Text) -> float:
    """Return the mean number of tokens that a pass generates, if it accepts guess i with probability sum of min(p, q)."""
    if len(text) == case.num_guesses:
        return 1.0
    kept = torch.minimum(case.p(text), case.q(text)).double().tolist()
    return 1.0 + float(sum(weight * _most_written(case, (*text, token)) for token, weight in enumerate(kept)))


def _short(x: Tensor) -> str:
    shown = ", ".join(f"{n:.3g}" for n in x.tolist()[:4])
    return f"[{shown}{', ...' if len(x) > 4 else ''}]"


CASES: dict[StageName, list[tuple[Any, ...]]] = {
    "runs": [(1, 0, 0), (1, 1, 0)],
    "small": [(2, 0, 1), (2, 1, 1), (3, 1, 2)],
    "drawn": [
        (2, 1, 3, PLAIN, "zeros"),
        (3, 1, 4, PLAIN, "certain"),
        (3, 1, 5, PLAIN, "equal"),
        (3, 2, 6),
        (4, 2, 7),
        (4, 2, 8, PLAIN, "zeros"),
    ],
    "varied": [(3, 2, 9, FLOAT32), (3, 2, 10, STRIDED), (3, 2, 11), (2, 5, 12), (37, 1, 13)],
}


def _each(rule: Implementation, cases: list[tuple[Any, ...]]) -> str | None:
    return first(_right(rule, Case(*case)) for case in cases)


SPECIFICATIONS = [
    Specification(
        "accept_or_resample",
        "accept_or_resample(p, guesses, dice) -> the accepted guesses, and one more token",
        "Whatever the draft guesses, each token is written with the model's own probability.",
        tuple(Stage(name, partial(_each, cases=cases), ()) for name, cases in CASES.items()),
    )
]
