"""Rounding to bfloat16 at random, right on average: weights can then be updated without float32 masters."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.counter_dropout import mix

_LOW_16, _LOW_32 = 0xFFFF, 0xFFFFFFFF


def stochastic_round(x: Tensor, key: tuple[int, ...], first: int = 0) -> Tensor:
    """Round float32 numbers to bfloat16, up or down at random, so that the expected result is x.

    x, result  any shape, float32 and bfloat16
    key        numbers of 64 bits at most, such as (seed, step, number of the parameter): another key, other numbers
    first      the global index of x's first element, where x is a flat shard

        x lies between neighbours a <= x < b:      b with probability (x - a) / (b - a), else a

    To 16 bits: a random 16-bit number is added to x's bits, whose lower 16 are then cut off. It is a hash of the key and
    of the element's global index, so that any rank that holds the element rounds it alike. An update too small for
    rounding to nearest, below 1/256 of a weight, then counts on average; each step adds noise of one bfloat16 step.
    A nan or an infinity stays. Raises ValueError where x is not float32.
    Source: Gupta et al., arXiv:1502.02551, section 3.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"x.dtype={x.dtype}: bits are cut off a float32; use x.float()")
    state = 0
    for word in key:
        state = mix(mix(state, word & _LOW_32), word >> 32 & _LOW_32)
    index = torch.arange(first, first + x.numel(), device=x.device).view(x.shape)
    random = mix(mix(state, index & _LOW_32), index >> 32) & _LOW_16
    bits = x.detach().contiguous().view(torch.int32)
    rounded = ((bits + random.to(torch.int32)) & ~_LOW_16).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
