"""Rotary position embeddings: a token's queries and keys are rotated by its position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rotation(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: tuple[float, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines by which `rotate` rotates the tokens at `positions`.

    positions  [T] or [B, T]             global, in any order: a token's angles depend only on its own position
    cos, sin   [T, 1, head_dim/2] or [B, T, 1, head_dim/2], in `dtype`

    angle of pair i at position t = t * theta^(-2i / head_dim), in float32 whatever `dtype` is, as in Hugging
    Face's Llama, so that float32 and float64 models see the same angles.

    With `scaling` = (factor,), angles are divided by the factor. With Llama 3.1's (factor, low, high, length), only those
    of pairs that turn less than `low` times in `length` tokens are; those that turn more than `high` times stay, and in
    between the two are mixed in proportion. Source: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.4.2 has the
    longer contexts; the formula is that of the model's published code.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    frequencies = 1.0 / theta**powers
    if scaling is not None:
        frequencies = _scaled(frequencies, *scaling)
    angles = positions[..., None].float() * frequencies
    return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


def _scaled(
    frequencies: Tensor, factor: float, low: float = 0.0, high: float = 0.0, length: float = 0.0
) -> Tensor:
    if not length:
        return frequencies / factor
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


class _Rotate(torch.autograd.Function):
    """A rotation. Its backward is the inverse rotation and saves no intermediates, where autograd would save six."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate feature pairs (i, i + head_dim/2) of every head by the token's angles.

    x, y  [B, T, heads, head_dim]    cos, sin from `rotation`

    y_i     = x_i cos_i - x_j sin_i        with j = i + head_dim/2
    y_j     = x_j cos_i + x_i sin_i
    backward: the same with -sin

    Source: RoFormer, arXiv:2104.09864, section 3.4.2, in the half-split order of Hugging Face's Llama.
    """
    y: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y
