"""The feed-forward half of a block."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.model.deferrable_linear import Linear
from minipar.model.overrides import MLPOverrides


class SwiGLU(nn.Module):
    """Gated feed-forward layer: y = down(silu(gate(x)) * up(x)).

    x, y  [B, T, D]    gate, up  [F, D]    down  [D, F]

    Costs 6 D F flops per token forward.
    Source: arXiv:2002.05202.
    """

    def __init__(self, dim: int, hidden_dim: int, device: Device = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.overrides = MLPOverrides()
        linear = partial(Linear, device=device, dtype=dtype)
        self.gate = linear(dim, hidden_dim)
        self.up = linear(dim, hidden_dim)
        self.down = linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.overrides.project_gate_up or self.project_gate_up)(x)
        y: Tensor = self.down(self.activate(gate, up))
        return y

    def project_gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x), self.up(x)

    @staticmethod
    def activate(gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of `down`."""
        return F.silu(gate) * up
