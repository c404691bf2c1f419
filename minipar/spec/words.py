"""Descriptions of mistakes: the error of a tensor, and the rank whose part of a sum is missing or was added twice."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import isfinite

import torch
from torch import Tensor

from minipar.comm.transport.traffic import Traffic
from minipar.spec.counted import counts_as

RTOL, FLOOR = 1e-10, 1e-13  # RTOL relative to the tensor's largest entry, FLOOR absolute; in float64


class Wrong(Exception):
    """A mistake in words, raised where it cannot be returned."""


def mismatch(
    what: str,
    got: object,
    want: Tensor | None,
    size: int = 1,
    rtol: float = RTOL,
    whole: Tensor | None = None,
) -> str | None:
    """Return None if `got` equals `want` up to rounding in float64, otherwise a sentence that says how `what` differs.

    size   the number of ranks; a factor of `size` is explained as a sum in place of a mean, or the reverse
    whole  the tensor that `want` is a part of; the tolerance is relative to the largest entry of `whole`
    """
    if want is None:
        return None if got is None else f"{what} should be None, and is a {type(got).__name__}"
    if not isinstance(got, Tensor):
        return f"{what} is a {type(got).__name__}; it should be a tensor {list(want.shape)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        kinds = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (got, want)]
        return f"{what} is {kinds[0]}; it should be {kinds[1]}"
    if want.numel() == 0:
        return None
    got, want = got.detach(), want.detach()
    if got.isnan().any() and not want.isnan().any():
        return f"{what} has nan at {_place(got.isnan())}"
    of = (want if whole is None else whole).double()
    largest = of[of.isfinite()].abs().max().item() if of.isfinite().any() else 0.0
    wrong = wrong_entries(got, want, rtol * largest + FLOOR)
    return f"{what} {_how(got, want, wrong, largest, size, rtol)}" if wrong.any() else None


def wrong_entries(got: Tensor, want: Tensor, allowed: float = 0.0) -> Tensor:
    """Return the mask of wrong entries: unequal integers, floats further apart than `allowed`, other nans or infinities."""
    if not want.is_floating_point():
        return got != want
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    return ~same & ~((got - want).abs() <= allowed)


def _how(got: Tensor, want: Tensor, wrong: Tensor, largest: float, size: int, rtol: float) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    found, expected = _distinct(got[at].item(), want[at].item())
    somewhere = (
        f"is wrong in {int(wrong.sum())} of {wrong.numel()} entries, first at {list(at)}: "
        f"{found}, it should be {expected}"
    )
    got, want = got.double(), want.double()
    if not (got.isfinite().all() and want.isfinite().all()):
        return somewhere
    if got.abs().max() <= rtol * largest:
        return "is zero"
    ratio = ((got * want).sum() / (want * want).sum()).item()
    if abs(ratio - 1) > 1e-6 and (got - ratio * want).abs().max() <= 1e-9 * largest:
        if _is_simple(ratio):
            return _factor(ratio, size)
        if got.numel() > 1:
            return f"is {ratio:.6g} times what it should be, in every entry"
    return f"is {found}; it should be {expected}" if got.numel() == 1 else somewhere


def _is_simple(ratio: float) -> bool:
    """Return whether the ratio is a whole number or a fraction of small ones, as a sum in place of a mean makes it."""
    return isfinite(ratio) and abs(ratio - Fraction(ratio).limit_denominator(64)) < 1e-9


def _distinct(found: float, expected: float) -> tuple[str, str]:
    """Format both numbers with 6 digits, or with as many as are needed to tell them apart."""
    if isinstance(found, int):
        return str(found), str(expected)
    for digits in (6, 9, 12):
        if f"{found:.{digits}g}" != f"{expected:.{digits}g}":
            return f"{found:.{digits}g}", f"{expected:.{digits}g}"
    return repr(found), repr(expected)


def _factor(ratio: float, size: int) -> str:
    if abs(ratio + 1) < 1e-9:
        return "has the wrong sign"
    if ratio > 1:
        reason = ": summed twice, or divided by too little" if abs(ratio - round(ratio)) < 1e-9 else ""
        if size > 1 and abs(ratio - size) < 1e-9:
            reason = ": summed, and not divided"
        return f"is exactly {ratio:.6g} times too large{reason}"
    if size > 1 and abs(ratio * size - 1) < 1e-9:
        return f"is exactly {size} times too small: divided where a sum was due, or one rank's part alone"
    return (
        f"is exactly {1 / ratio:.6g} times too small"
        if ratio > 0
        else f"is {ratio:.6g} times what it should be"
    )


def _place(where: Tensor) -> list[int]:
    return where.nonzero()[0].tolist()


def explain_sum(total: float, size: int) -> str | None:
    """Explain a sum to which rank r added 10**r, so that digit r counts rank r's additions. None if every digit is 1."""
    right = sum(10**r for r in range(size))
    if total == right:
        return None
    if abs(total * size - right) < size:
        return "it is the mean, not the sum"
    digits = [int(total) // 10**r % 10 for r in range(size)]
    missing = [r for r, n in enumerate(digits) if n == 0]
    twice = [r for r, n in enumerate(digits) if n > 1]
    said = []
    if missing:
        said.append(f"the part of {_names(missing)} is missing")
    if twice:
        said.append(f"the part of {_names(twice)} was added more than once")
    return " and ".join(said) or f"it is {total}, which no sum of parts makes"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def wrong_bytes(sent: Traffic, formula: float, size: int, of: str, name: str) -> str | None:
    """Return None if this rank sent as many bytes as the formula says, otherwise a sentence with both numbers."""
    if sent.sent_bytes == formula:
        return None
    return f"with {size} ranks and {of} it sent {in_words(sent)}; {name} sends {formula:g}"


def in_words(sent: Traffic) -> str:
    """Say how many bytes were sent, and by which operations."""
    kinds = " + ".join(f"{counts_as(kind)} {num_bytes}" for kind, num_bytes in sent.by_kind.items())
    return f"{sent.sent_bytes} bytes{f' ({kinds})' if kinds else ''}"


def first(found: Iterable[str | None]) -> str | None:
    """Return the first description that is not None. A generator stops there: pass a list if ranks must make every call."""
    return next((words for words in found if words is not None), None)


def grad_of(x: Tensor) -> Tensor:
    """Return x.grad, after a backward."""
    assert x.grad is not None
    return x.grad


def generator(*key: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(hash(key) % 2**31)


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)
