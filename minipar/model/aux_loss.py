"""Auxiliary losses that balance the experts' load, a function that adds their gradients, and routing metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


def balance_losses(counts: Tensor, prob_sums: Tensor, tokens: Tensor, coef: float) -> Tensor:
    """Return coef * E * sum over experts of f_e P_e for each group; it is exactly `coef` if the load is even.

    counts     [N, E]   choices per expert, before any is dropped
    prob_sums  [N, E]   sum over the group's tokens of the router's probability
    tokens     [N]

    f_e = counts_e / sum of counts      no gradient flows through a count
    P_e = prob_sums_e / tokens

    Source: arXiv:2101.03961, equations 4 to 6.
    """
    counts = counts.to(prob_sums.dtype)  # a quotient of two integer tensors would be float32
    f = counts / counts.sum(1, keepdim=True)
    return coef * counts.shape[1] * (f * prob_sums / tokens[:, None]).sum(1)


def z_losses(logits: Tensor, real: Tensor, coef: float) -> Tensor:
    """Return coef * mean over the tokens of logsumexp(logits)^2 for each group.

    logits  [N, g, E]    real  [N, g]: False for padding    returns  [N]

    Keeps logits small, so that rounding errors do not decide the routing.
    Source: ST-MoE, arXiv:2202.08906, equation 5.
    """
    squares = logits.logsumexp(-1).square()
    return coef * squares.masked_fill(~real, 0).sum(1) / real.sum(1)


def attach_aux_loss(y: Tensor, auxiliary: Tensor, scale: float = 1.0) -> Tensor:
    """Return y unchanged; its backward also runs the backward of `auxiliary`, as if scale * auxiliary were in the loss.

    A layer in the middle of a pipeline thus trains on its own auxiliary loss, although the loss is on another rank.
    Source: Megatron-LM's MoEAuxLossAutoScaler.
    """
    same: Tensor = _AttachAuxLoss.apply(y, auxiliary, scale)  # type: ignore[no-untyped-call]
    return same


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, auxiliary: Tensor, scale: float) -> Tensor:
        ctx.like, ctx.scale = auxiliary.detach(), scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, torch.full_like(ctx.like, ctx.scale), None


@dataclass(frozen=True, eq=False)
class MoEMetrics:
    """Routing metrics of an MoE layer. The metrics of a batch's parts add up to the metrics of the whole batch.

    balance_loss, z_loss  sums over these tokens' routing groups, divided by the number of groups in the whole batch
    load                  [E] choices per expert; kept_load [E] choices within the expert's capacity
    tokens                number of tokens; unserved: number of tokens without a kept choice
    entropy_sum           entropy of the router's distribution, in nats, summed over tokens
    """

    balance_loss: Tensor
    z_loss: Tensor
    load: Tensor
    kept_load: Tensor
    tokens: int
    unserved: Tensor
    entropy_sum: Tensor

    @property
    def kept(self) -> Tensor:
        return self.kept_load.sum()

    @property
    def dropped(self) -> Tensor:
        return (self.load - self.kept_load).sum()

    @property
    def drop_rate(self) -> float:
        """The fraction of all choices that were dropped."""
        return float(self.dropped) / max(1, int(self.load.sum()))

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean load: 1 for an even load, E if one expert has all of the load."""
        return float(self.load.max()) * len(self.load) / max(1, int(self.load.sum()))

    @property
    def entropy(self) -> float:
        """The router's entropy in nats per token: log E for a uniform distribution, 0 for a certain choice."""
        return float(self.entropy_sum) / max(1, self.tokens)

    def detach(self) -> MoEMetrics:
        return replace(
            self, **{f.name: getattr(self, f.name).detach() for f in fields(self) if f.name != "tokens"}
        )

    def __add__(self, other: MoEMetrics) -> MoEMetrics:
        return MoEMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
