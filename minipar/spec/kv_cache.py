"""Specification of attention with a cache: a new token attends to all tokens before it, cached or new, and to itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.question import Asked, Given, Question, specification
from minipar.spec.specification import Stage
from minipar.spec.varied import KINDS, Kind
from minipar.spec.words import generator, normal

HUNDREDS = Kind("with scores of hundreds", scale=30.0)


class Cut(NamedTuple):
    """A cut of the cache, which keeps only the first `length` tokens."""

    length: int


Text = list[int | Cut]  # numbers of new tokens, and cuts
# By seed: the texts, for each of which there are two new caches.
TEXTS: list[list[Text]] = [
    [[1]],
    [[2], [1, 1], [3, 1], [2, 3], [3, 2, Cut(3), 1]],
    [[1, 1, 1, 1], [5, 1, 1], [3, 0, 1], [0, 2]],
    [[1, 4, 2], [4, Cut(4), 2], [4, Cut(0), 2, 1]],
    [[3, 3, Cut(4), 1, Cut(4), 2]],
    [[4, 1, 3]],
]
LARGE: Text = [70, 1, 33, Cut(90), 1]


def draw(texts: list[Text], seed: int, kind: Kind) -> Given:
    """Draw the queries, keys and values of all texts' tokens, [B, H, tokens, d]."""
    num_tokens = sum(use for text in texts for use in text if isinstance(use, int))
    B, H, d = 1 + seed % 3, 1 + seed % 2 * 2, 3 + seed % 2 * 2
    numbers = generator(num_tokens, seed, kind.seed)
    q, k, v = (normal(numbers, B, H, num_tokens, d) for _ in range(3))
    q, k, v = kind.rounded(kind.scale * q), kind.rounded(kind.scale * k), kind.rounded(v)
    if kind.nan:
        v.view(-1)[0] = torch.inf  # a value of the first token, which every query sees
    return [{"texts": texts, "q": kind.with_nan(q), "k": k, "v": v}]


def _use(make: Implementation, world: object, texts: list[Text], *qkv: Tensor) -> list[Tensor]:
    """Use two caches in turn for each text, the other one with -q and -v; return the outputs, one after another."""
    begin, outs = 0, []
    for text in texts:
        one, other = make(), make()
        for use in text:
            if isinstance(use, Cut):
                one.cut(use.length)
                other.cut(use.length)
                continue
            q, k, v = (x[:, :, begin : begin + use] for x in qkv)
            if qkv[0].is_contiguous():
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            outs.append((one(q, k, v), other(-q, k, -v)))
            begin += use
    return [torch.cat(each, 2) for each in zip(*outs)]


def _outputs(given: Given, see: str = "held", power: float = 0.0, causal: bool = True) -> Tensor:
    """Return the outputs of queries times head_dim ** power, which see these tokens of their text."""
    q, k, v = (given[0][name] for name in "qkv")
    begin, outs = 0, []
    for text in given[0]["texts"]:
        first, held = begin, list[int]()
        for use in text:
            if isinstance(use, Cut):
                held = held[: use.length]
                continue
            new, begin = list(range(begin, begin + use)), begin + use
            held += new
            seen = {"held": held, "new": new, "first": held[:use], "all": list(range(first, begin))}[see]
            scaled = q[:, :, new] * q.shape[3] ** power
            outs.append(plain_attention(scaled, k[:, :, seen], v[:, :, seen], causal))
    return torch.cat(outs, 2)


def _answer(given: Given) -> list[list[Tensor]]:
    mirrored = {**given[0], "q": -given[0]["q"], "v": -given[0]["v"]}
    return [[_outputs(given), _outputs([mirrored])]]


CAUSES: dict[str, dict[str, Any]] = {
    "it sees this piece alone, without the tokens before": {"see": "new"},
    "queries see later tokens of their piece": {"causal": False},
    "query i of the piece sees keys 0 to i, as if the piece were the first": {"see": "first"},
    "scores are not divided by sqrt(d)": {"power": 0.5},
    "it still sees tokens that were cut": {"see": "all"},
}


def _cause(asked: Asked, got: Tensor) -> str:
    """Name the usual mistake that gives these outputs, if one does."""
    for words, mistake in CAUSES.items():
        if asked.kind.mismatch("", got, _outputs(asked.given, **mistake)) is None:
            return f": {words}"
    return ""


CACHE = Question(
    lambda size, seed, kind: draw([LARGE] if kind.large else TEXTS[seed], seed, kind),
    _answer,
    (
        "the output, piece after piece,",
        "the output of another cache, used in turn (each keeps its own tokens),",
    ),
    call=_use,
    differentiated=False,
    cause=_cause,
)


def _memory(make: Implementation) -> str | None:
    shape, num_tokens = (1, 8, 1, 64), 48
    with torch.no_grad():
        before = storages()
        cache = make()
        for _ in range(num_tokens):
            cache(*(torch.ones(shape, dtype=torch.float64) for _ in range(3)))
        held = held_bytes(before)
    need = num_tokens * 2 * 8 * 64 * 8
    if held > 2.5 * need:
        return f"after {num_tokens} tokens it holds {held} bytes; their keys and values are {need}"
    return None


SPECIFICATIONS = [
    specification(
        "kv_cache",
        "Cache()(q, k, v) -> out [batch, heads, new tokens, head_dim]; Cache().cut(length)",
        "New tokens attend to all that were read before and to themselves, as one pass over the whole text would.",
        [CACHE],
        [Stage("memory", _memory, ())],
        (*KINDS, HUNDREDS),
        alone=True,
    )
]
