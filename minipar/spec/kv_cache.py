"""Specification of attention with a cache: a new token attends to all tokens before it, cached or new, and to itself."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.model.attention import plain_attention
from minipar.spec.from_file import Implementation
from minipar.spec.memory import held_bytes, storages
from minipar.spec.specification import Specification, Stage
from minipar.spec.varied import KINDS, PLAIN, Kind
from minipar.spec.words import first, generator, mismatch, normal

# Multiplies queries and keys, so that scores are in the hundreds: exp overflows unless the maximum is subtracted.
HUNDREDS = 30.0


class Cut(NamedTuple):
    """A cut of the cache, which keeps only the first `length` tokens."""

    length: int

    def __str__(self) -> str:
        return f"cut to {self.length}"


Use = int | Cut  # a number of new tokens, or a cut
SMALL: list[list[Use]] = [[2], [1, 1], [3, 1], [2, 3], [3, 2, Cut(3), 1]]
DRAWN: list[list[Use]] = [
    [1, 1, 1, 1],
    [5, 1, 1],
    [3, 0, 1],
    [0, 2],
    [1, 4, 2],
    [4, Cut(4), 2],
    [4, Cut(0), 2, 1],
    [3, 3, Cut(4), 1, Cut(4), 2],
]
LARGE: list[Use] = [70, 1, 33, Cut(90), 1]


class Case(NamedTuple):
    """The uses of one cache, and the queries, keys and values of its tokens, [B, H, tokens, d]."""

    uses: list[Use]
    tensors: list[Tensor]

    @classmethod
    def of(cls, uses: list[Use], seed: int, kind: Kind = PLAIN, scale: float = 1.0) -> Case:
        num_tokens = sum(use for use in uses if not isinstance(use, Cut))
        B, H, d = 1 + seed % 3, 1 + seed % 2 * 2, 3 + seed % 2 * 2
        draw = generator(num_tokens, seed, kind.seed)
        q, k, v = (normal(draw, B, H, num_tokens, d) for _ in range(3))
        q, k, v = kind.rounded(scale * q), kind.rounded(scale * k), kind.rounded(v)
        if kind.nan:
            v.view(-1)[0] = torch.inf  # a value of the first token, which every query sees
        return cls(uses, [kind.with_nan(q), k, v])

    def __str__(self) -> str:
        B, H, _, d = self.tensors[0].shape
        return f"pieces of {', '.join(map(str, self.uses))} tokens [{B}, {H}, T, {d}]"


def _right(make: Implementation, case: Case, kind: Kind = PLAIN) -> str | None:
    return first([_wrong_piece(make(), case, kind)])


def _wrong_piece(cache: Implementation, case: Case, kind: Kind) -> str | None:
    """Use the cache as the case says; describe the first piece whose output is wrong."""
    held: list[int] = []
    begin = 0
    for i, use in enumerate(case.uses):
        if isinstance(use, Cut):
            cache.cut(use.length)  # type: ignore[attr-defined]
            held = held[: use.length]
            continue
        new = list(range(begin, begin + use))
        held, begin = held + new, begin + use
        out = cache(*(kind.given(x[:, :, new]) for x in case.tensors))
        q, k, v = case.tensors
        want = plain_attention(q[:, :, new], k[:, :, held], v[:, :, held])
        if words := kind.mismatch(f"{case}: the output of piece {i}", out, want):
            return words + _cause(out, want, case, new, held, kind)
    return None


def _cause(out: object, want: Tensor, case: Case, new: list[int], held: list[int], kind: Kind) -> str:
    """Name the usual mistake that gives this output, if one does."""
    if not isinstance(out, Tensor) or out.shape != want.shape or not want.numel():
        return ""
    q, k, v = (x[:, :, new] for x in case.tensors)
    keys, values = (x[:, :, held] for x in case.tensors[1:])
    all_keys, all_values = (x[:, :, : new[-1] + 1] for x in case.tensors[1:])
    as_if_first = torch.ones(len(new), len(held), dtype=torch.bool).tril()
    scores = (q @ keys.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(~as_if_first, -torch.inf)
    causes = {
        "it sees this piece alone, without the tokens before": plain_attention(q, k, v),
        "queries see later tokens of their piece": plain_attention(q, keys, values, causal=False),
        "query i of the piece sees keys 0 to i, as if the piece were the first": scores.softmax(-1) @ values,
        "scores are not divided by sqrt(d)": plain_attention(q * q.shape[3] ** 0.5, keys, values),
        "it still sees tokens that were cut": plain_attention(q, all_keys, all_values),
    }
    for words, tensor in causes.items():
        if mismatch("", want, tensor) and kind.mismatch("", out, tensor) is None:
            return f": {words}"
    return ""


def _small(make: Implementation) -> str | None:
    return first(_right(make, Case.of(uses, seed)) for seed, uses in enumerate(SMALL)) or _two_at_once(make)


def _drawn(make: Implementation) -> str | None:
    for seed, uses in enumerate(DRAWN):
        if words := _right(make, Case.of(uses, seed)):
            return words
    if words := _right(make, Case.of([3, 1, 2], 1, scale=HUNDREDS)):
        return f"with scores of hundreds, {words}"
    return None


def _two_at_once(make: Implementation) -> str | None:
    """Check that two caches, such as those of two layers, are independent."""
    one, other = make(), make()
    q, k, v = Case.of([6], 1).tensors
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        piece = [x[:, :, begin:end].contiguous() for x in (q, k, v)]
        want = plain_attention(piece[0], k[:, :, :end], v[:, :, :end])
        wanted = plain_attention(-piece[0], k[:, :, :end], -v[:, :, :end])
        found = one(*piece), other(-piece[0], piece[1], -piece[2])
        for got, right in zip(found, (want, wanted)):
            if words := mismatch("two caches used in turn: an output", got, right):
                return words + ": each should keep its own tokens"
    return None


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


def _varied(make: Implementation) -> str | None:
    for kind in KINDS:
        uses: list[Use] = LARGE if kind.large else [4, 1, 3]
        if words := _right(make, Case.of(uses, 3 if kind.large else 1, kind), kind):
            return words
    return None


SPECIFICATIONS = [
    Specification(
        "kv_cache",
        "Cache()(q, k, v) -> out [batch, heads, new tokens, head_dim]; Cache().cut(length)",
        "New tokens attend to all that were read before and to themselves, as one pass over the whole text would.",
        (
            Stage("runs", partial(_right, case=Case.of([1], 0)), ()),
            Stage("small", _small, ()),
            Stage("drawn", _drawn, ()),
            Stage("memory", _memory, ()),
            Stage("varied", _varied, ()),
        ),
    )
]
