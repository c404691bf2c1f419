"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device


class RMSNorm(nn.Module):
    """Scale each token to root mean square 1, then by a learned weight: y = w x / sqrt(mean(x^2) + eps).

    x, y  [..., D]    w  [D]

    16-bit inputs are normalised in float32 and rounded before the multiplication by w, as in Hugging Face's Llama.
    float64 inputs are normalised in float64, where Hugging Face's Llama uses float32.
    Source: arXiv:1910.07467.
    """

    def __init__(self, dim: int, eps: float, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
