"""Checks of arguments with one-line error messages, and the errors of a failed rank, of a save and of a stopped run."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def require_divides(what: str, d: int, whole: str, n: int) -> None:
    """Raise ValueError unless d divides n: `tp=3 does not divide num_heads=8; use 1, 2, 4 or 8`."""
    if d < 1 or n % d:
        raise ValueError(f"{what}={d} does not divide {whole}={n}; use {one_of(divisors(n))}")


def require_positive(**sizes: object) -> None:
    """Raise ValueError unless every size is a whole number of 1 or more: `m=0; use a whole number of 1 or more`."""
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r}; use a whole number of 1 or more")


def one_of(choices: Iterable[object], near: object = None) -> str:
    """List valid choices for an error message: `a`, `a or b`, `a, b or c`; with `near`, also suggest the closest one."""
    words = [str(c) for c in choices]
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
    found = [] if near is None else difflib.get_close_matches(str(near), words, 1)
    return f"{listed}; did you mean {found[0]}?" if found else listed


class Stopped(KeyboardInterrupt):
    """The error raised when a signal has ended a run; `signal` is its number, or 0 if another process got it."""

    def __init__(self, words: str, signal: int = 0):
        self.signal = signal
        super().__init__(words)


class SaveError(RuntimeError):
    """The error raised when a checkpoint cannot be written: the step, the folder, the rank, and why."""


class RankError(RuntimeError):
    """The error raised when a rank has failed: which rank, its traceback, and the state of the other ranks.

    rank              the first rank that failed
    remote_traceback  that rank's traceback as text, or how its process ended
    waiting           rank -> what it was doing at that moment, for the other ranks
    returned          rank -> result, for the ranks that had already returned
    """

    def __init__(
        self,
        rank: int,
        remote_traceback: str,
        waiting: dict[int, str] | None = None,
        returned: dict[int, object] | None = None,
    ):
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.waiting = dict(waiting or {})
        self.returned = dict(returned or {})
        others = "".join(f"\n  rank {r}: {what}" for r, what in sorted(self.waiting.items()))
        super().__init__(
            f"rank {rank} failed:\n{remote_traceback.rstrip()}" + (f"\nmeanwhile:{others}" if others else "")
        )

    def __reduce__(self) -> tuple[object, ...]:
        return RankError, (self.rank, self.remote_traceback, self.waiting, self.returned)
