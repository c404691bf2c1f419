"""Rotary position embeddings: a token's queries and keys are rotated by its position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines by which `rotate` rotates the tokens at `positions`.

    positions  [T] or [B, T]             global, in any order: a token's angles depend only on its own position
    cos, sin   [T, 1, head_dim/2] or [B, T, 1, head_dim/2], in `dtype`

    angle of pair i at position t = t * theta^(-2i / head_dim), in float32 whatever `dtype` is, as in Hugging
    Face's Llama, so that float32 and float64 models see the same angles.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**powers)
    return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


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
