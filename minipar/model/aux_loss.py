"""Losses that keep experts evenly used, how they reach the gradients, and what is reported of a layer's routing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


def balance_losses(counts: Tensor, prob_sums: Tensor, tokens: Tensor, coef: float) -> Tensor:
    """coef * E * sum over experts of f_e P_e, for each group; exactly `coef` where choices are even.

    counts     [N, E]   choices of each expert, before any is dropped
    prob_sums  [N, E]   sum over the group's tokens of the router's probability
    tokens     [N]

    f_e = counts_e / sum of counts      no gradient flows through a count
    P_e = prob_sums_e / tokens

    Source: arXiv:2101.03961, equations 4 to 6.
    """
    counts = counts.to(prob_sums.dtype)  # a quotient of whole numbers would be float32
    f = counts / counts.sum(1, keepdim=True)
    return coef * counts.shape[1] * (f * prob_sums / tokens[:, None]).sum(1)


def z_losses(logits: Tensor, real: Tensor, coef: float) -> Tensor:
    """coef * mean over a group's tokens of logsumexp(logits)^2: keeps logits small, so rounding does not route.

    logits  [N, g, E]    real  [N, g]: False for padding    returns  [N]

    Source: ST-MoE, arXiv:2202.08906, equation 5.
    """
    squares = logits.logsumexp(-1).square()
    return coef * squares.masked_fill(~real, 0).sum(1) / real.sum(1)


def attach_aux_loss(y: Tensor, auxiliary: Tensor, scale: float = 1.0) -> Tensor:
    """y as it is; its backward also starts the backward of `auxiliary`, as if scale * auxiliary were in the loss.

    A layer in the middle of a pipeline thus trains on its own auxiliary loss, although the loss is on another rank.
    Source: the device is Megatron-LM's (MoEAuxLossAutoScaler).
    """
    return _AttachAuxLoss.apply(y, auxiliary, scale)


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, auxiliary, scale):
        ctx.like, ctx.scale = auxiliary.detach(), scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy, torch.full_like(ctx.like, ctx.scale), None


@dataclass(frozen=True, eq=False)
class MoEMetrics:
    """What a mixture of experts did with some tokens. Metrics of parts of a batch add up to the whole batch's.

    balance_loss, z_loss  sums over the routing groups seen, divided by the number of groups in the whole batch
    load                  [E] choices of each expert; kept_load [E] those it had room for
    tokens                how many there were; unserved: how many of them reached no expert at all
    entropy_sum           of the router's distribution, in nats, summed over tokens
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
        """The part of all choices that was dropped."""
        return float(self.dropped) / max(1, int(self.load.sum()))

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean load: 1 where it is even, E where one has it all."""
        return float(self.load.max()) * len(self.load) / max(1, int(self.load.sum()))

    @property
    def entropy(self) -> float:
        """Nats a token: log E for a router that does not care, 0 for one that is certain."""
        return float(self.entropy_sum) / max(1, self.tokens)

    def detach(self) -> MoEMetrics:
        return replace(
            self, **{f.name: getattr(self, f.name).detach() for f in fields(self) if f.name != "tokens"}
        )

    def __add__(self, other: MoEMetrics) -> MoEMetrics:
        return MoEMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
