"""Dropout whose mask depends on each element's global coordinates, not on the rank or the order of computation."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # public torch.compiler.disable would import Dynamo here

_LOW_32 = 0xFFFFFFFF


def dropout(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    layer: int,
    site: int,
    sample_ids: Tensor,
    indices: Tensor,
    feature_offset: int = 0,
) -> Tensor:
    """Zero each element with probability p and divide all other elements by 1 - p, by a counter-based mask.

    x, y        [B, T, D]
    sample_ids  [B]            each row's number in the step's batch
    indices     [T] or [B, T]  each token's index in its sample, whatever documents the sample holds
    feature_offset             the global index of x's first feature, where features are split over ranks

    y = x / (1 - p) where hash(seed, step, layer, site, sample, index, feature) >= p * 2^32, else 0

    A rank that holds any part of the batch computes that part of the same mask; there is no generator state to
    synchronize. Keeps the mask, 1 byte per element, for the backward.
    Source: counter-based generators, Salmon et al., SC 2011; the mixer is MurmurHash3's 32-bit finaliser.
    """
    mask = keep_mask(x.shape[-1], p, (seed, step, layer, site), sample_ids, indices, feature_offset)
    return torch.where(mask, x * (1 / (1 - p)), 0.0)


def keep_mask(
    num_features: int,
    p: float,
    key: tuple[int, ...],
    sample_ids: Tensor,
    indices: Tensor,
    feature_offset: int = 0,
) -> Tensor:
    """Return the mask of kept elements, bool [B, T, D]; arguments as in `dropout`, key = (seed, step, layer, site)."""
    return _hash(num_features, key, sample_ids, indices, feature_offset) >= round(p * 2**32)


def uniform(num_features: int, key: tuple[int, ...], sample_ids: Tensor, indices: Tensor) -> Tensor:
    """Return numbers uniform in (0, 1), float64 [B, T, num_features], by the hash that makes `dropout`'s mask.

    key  (seed, step, layer, site)
    """
    # In float32 the largest hashes would round to 1, and the noise made of them would be infinite.
    return (_hash(num_features, key, sample_ids, indices).double() + 0.5) / 2**32


# Each step of the hash uses the previous step's result twice. torch's compilers expand that, and took minutes for a layer.
@_disable_dynamo
def _hash(
    num_features: int, key: tuple[int, ...], sample_ids: Tensor, indices: Tensor, feature_offset: int = 0
) -> Tensor:
    """Return a 32-bit hash for each element of [B, T, num_features]."""
    state: int | Tensor = 0
    for word in key:
        state = mix(mix(state, word & _LOW_32), word >> 32)
    samples = mix(state, sample_ids)
    tokens = mix(samples[:, None], indices)
    features = torch.arange(feature_offset, feature_offset + num_features, device=indices.device)
    return mix(tokens[..., None], features)


@overload
def mix(state: int | Tensor, word: Tensor) -> Tensor: ...
@overload
def mix(state: int | Tensor, word: int | Tensor) -> int | Tensor: ...
def mix(state: int | Tensor, word: int | Tensor) -> int | Tensor:
    """Mix one more word into a 32-bit state; both are ints or int64 tensors.

    Products may overflow int64, but their low 32 bits stay correct; shifts are logical, since no value is negative. The
    word is spread over all 32 bits before the XOR with the state, so that consecutive counters differ in high bits, too.
    """
    h = state ^ ((word + 1) * 0x9E3779B9 & _LOW_32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _LOW_32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _LOW_32
    return h ^ (h >> 16)
