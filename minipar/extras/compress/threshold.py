"""The choice of the elements that are kept: an exact fraction of a vector, or all above a threshold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from torch import Tensor

Choose = Callable[[Tensor], Tensor]  # [n] -> [n] bool, True where an element is kept


def largest(x: Tensor, fraction: float) -> Tensor:
    """Keep the ceil(fraction n) elements with the largest |x|, except zeros."""
    kept = torch.zeros_like(x, dtype=torch.bool)
    kept[x.abs().topk(ceil(fraction * len(x)), sorted=False).indices] = True
    return kept & (x != 0)


def above_threshold(x: Tensor, fraction: float) -> Tensor:
    """Keep the elements with |x| >= t, except zeros. t is the largest of 1, 2, 5, 10, 20, 50, ... that keeps `fraction`.

    Finding t takes one pass over x, where top-k sorts. How many elements are kept varies from vector to vector: of a normal
    distribution, 0.2 n to 0.61 n for fraction = 0.2, since t may be 2.5 times too low.
    Source: TAGC's code (ipolyakov/TAGC), which tries 25 thresholds from 1e-20 to 0.5 by bisection.
    """
    thresholds = torch.tensor([m * 10.0**e for e in range(-30, 31) for m in (1, 2, 5)]).to(x)
    level = torch.bucketize(x.abs(), thresholds, right=True)  # number of thresholds that an element reaches
    reach = torch.bincount(level, minlength=len(thresholds) + 1).flip(0).cumsum(0).flip(0)
    highest = (reach >= ceil(fraction * len(x))).sum() - 1
    return (level >= highest) & (x != 0)


def choose_by(threshold: bool, fraction: float) -> Choose:
    return partial(above_threshold if threshold else largest, fraction=fraction)
