"""Random rounding to bfloat16 that is exact on average, so that weights can be updated without float32 masters."""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.model.counter_dropout import mix

_LOW_16, _LOW_32 = 0xFFFF, 0xFFFFFFFF


def stochastic_round(x: Tensor, key: tuple[int, ...], first: int = 0) -> Tensor:
    """Round float32 values to bfloat16, up or down at random, so that the expected result is x.

    x, result  any shape, float32 and bfloat16
    key        integers of at most 64 bits, such as (seed, step, index of the parameter); each key gives other random bits
    first      the global index of x's first element, if x is a flat shard

        for neighbours a <= x < b:      b with probability (x - a) / (b - a), else a

    A random 16-bit integer is added to x's bits, and then the lower 16 bits are cut off. The integer is a hash of the key
    and the element's global index, so all ranks that hold the element round it in the same way. An update below 1/256 of a
    weight, which rounding to nearest would lose, then counts on average. Each rounding adds noise of less than the distance
    of two bfloat16 values.
    nan and infinity stay unchanged. Raises ValueError if x is not float32.
    Source: Gupta et al., arXiv:1502.02551, section 3.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"x.dtype={x.dtype}: bits are cut off a float32; use x.float()")
    state: int | Tensor = 0
    for word in key:
        state = mix(mix(state, word & _LOW_32), word >> 32 & _LOW_32)
    index = torch.arange(first, first + x.numel(), device=x.device).view(x.shape)
    random = mix(mix(state, index & _LOW_32), index >> 32) & _LOW_16
    bits = x.detach().contiguous().view(torch.int32)
    rounded = ((bits + random.to(torch.int32)) & ~_LOW_16).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
