"""Formulas for the elements that a rank sends and holds for one linear layer, forward and backward, in each TP layout.

    M rows, D input and F output features, t ranks

    layout                   sends, elements                                          holds, elements
    1D, column               2(t-1)/t M D                                             D F/t + M D + M F/t
    1D, row                  2(t-1)/t M F                                             D F/t + M D/t + M F
    2D, q^2 = t              3(q-1) (M D + D F)/t                                     (D F + M D + M F)/t
    2.5D, d q^2 = t          3(q-1) (M D/d + D F)/q^2 + 2(d-1)/d D F/q^2              (D F d + M D + M F)/t
    3D, p^3 = t              (p-1) (3 M D + 3 D F + 2 M F)/t                          (D F + M D + M F)/t

1D sends no weights, but the elements that a rank sends hardly decrease as t grows. So 1D is best inside a machine, and
while M is small compared with D and F. A rank sends about 3/sqrt(t) of M D + D F in 2D, and about 1/t^(2/3) of
3 M D + 3 D F + 2 M F in 3D. These layouts are best when M or t is large, or when a full activation does not fit on a rank.

Other sources count differently. Optimus (arXiv:2104.05343, table 1) counts the time of trees that run one after another,
which in 2D is q log2(q) / (q-1) times the elements that a rank sends. Colossal-AI's documentation gives the same number of
elements held, but q times as many sent in 2D and 2.5D. In 3D, with M = D = F, Colossal-AI sends 6 (p-1)/t of a matrix,
not 8, because it keeps the gathered x and w, which are p times as large, for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isqrt
from typing import NamedTuple


class Cost(NamedTuple):
    """The exact numbers of elements that a rank sends and holds."""

    sent: Fraction
    held: Fraction


def column_cost(t: int, m: int, d_in: int, d_out: int) -> Cost:
    """Return the cost of 1D, split by output features; every rank holds the full input."""
    return Cost(Fraction(2 * (t - 1) * m * d_in, t), Fraction(d_in * d_out + m * d_out, t) + m * d_in)


def row_cost(t: int, m: int, d_in: int, d_out: int) -> Cost:
    """Return the cost of 1D, split by input features; every rank holds the full output."""
    return Cost(Fraction(2 * (t - 1) * m * d_out, t), Fraction(d_in * d_out + m * d_in, t) + m * d_out)


def summa_cost(t: int, m: int, d_in: int, d_out: int, depth: int = 1) -> Cost:
    """Return the cost of 2D, or of 2.5D with depth > 1."""
    q2 = t // depth
    w, x = Fraction(d_in * d_out, q2), Fraction(m * d_in, t)
    sums = Fraction(2 * (depth - 1), depth) * w
    return Cost(3 * (isqrt(q2) - 1) * (x + w) + sums, w + x + Fraction(m * d_out, t))


def cube_cost(t: int, m: int, d_in: int, d_out: int) -> Cost:
    """Return the cost of 3D."""
    p = round(t ** (1 / 3))
    w, x, y = Fraction(d_in * d_out, t), Fraction(m * d_in, t), Fraction(m * d_out, t)
    return Cost((p - 1) * (3 * x + 3 * w + 2 * y), w + x + y)


def mlp_cost(first: Callable[..., Cost], second: Callable[..., Cost], t: int, m: int, d: int, f: int) -> Cost:
    """Add the costs of the two matrices of an MLP, D -> F -> D."""
    up, down = first(t, m, d, f), second(t, m, f, d)
    return Cost(up.sent + down.sent, up.held + down.held)
