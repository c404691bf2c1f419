"""The MoE layer, a mixture of experts: many MLPs, of which each token uses a few.

Adds top-k, other routers, shared experts, padded buffers and metrics to `simple/moe.py`. All experts are on one rank,
unless `expert_parallel` shards them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.moe_config import MoEConfig
from minipar.model.aux_loss import MoEMetrics, balance_losses, z_losses
from minipar.model.grouped_mlp import Experts
from minipar.model.groups import RoutingGroups
from minipar.model.init import initialize
from minipar.model.mlp import SwiGLU
from minipar.model.overrides import Dispatched, MoEOverrides
from minipar.model.permute import LocalDispatch, PermutePlan, RowPerChoice, plan_kept_rows, plan_padded_rows
from minipar.model.router import Router, choose_experts, expert_choice, position_in_expert
from minipar.support.errors import require_positive


class Routing(NamedTuple):
    """The routing of M tokens, k choices each, in N groups.

    expert, place, kept, weight  [M, k]   where `kept` is False, the other three have no meaning
                                          place: the position of the choice in its expert's queue
    load, kept_load              [N, E]   choices per group and expert: all of them, and only those within the capacity
    """

    expert: Tensor
    place: Tensor
    kept: Tensor
    weight: Tensor
    load: Tensor
    kept_load: Tensor


class MoE(nn.Module):
    """Experts in place of an MLP: y_t = shared(x_t) + sum over token t's kept choices of weight * expert(x_t).

    x, y        [B, T, D] or [T, D]
    indices     [T] or [B, T]  each token's index in its sample; with sample_ids [B] and step, as in `Transformer`, it
                keys the jitter and the noise
    hidden_dim  each expert's width; `options` are fields of `MoEConfig`
    num_groups  None or, if each call gets only a part of a batch, the number of routing groups in the whole batch.
                Auxiliary losses are means over that number, so that the losses of the parts sum to the whole batch's loss

    A choice beyond its expert's capacity is dropped. For a token whose choices are all dropped, y is 0 (or the shared
    expert's output), and only the residual stream passes it on. With capacity_factor=None nothing is dropped.

    Returns (y, metrics). The losses in `metrics` can be added to the loss; `Block` does that by `attach_aux_loss`.
    Parameters are router.weight [E, D], experts.{gate,up} [E, F, D], experts.down [E, D, F], and those of the shared
    expert.

    Costs 6 k D F flops per token forward, whatever E is; only used rows are computed, unless `pad_to_capacity` is set.
    Raises ValueError for invalid options, or if a router's logit is not finite in training.
    Source: Switch Transformers, arXiv:2101.03961; GShard, arXiv:2006.16668; ST-MoE, arXiv:2202.08906.
    """

    balance_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 1,
        capacity_factor: float | None = 1.25,
        *,
        layer: int = 0,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        require_positive(num_experts=num_experts)
        self.options = MoEConfig(
            num_experts=num_experts, top_k=top_k, capacity_factor=capacity_factor, **options
        )
        self.overrides = MoEOverrides()
        self.num_groups: int | None = None
        self.loss_scale = 1.0
        self.metrics: MoEMetrics | None = None
        noisy, shared_dim = self.options.router == "noisy_top_k", self.options.shared_dim
        self.router = Router(dim, num_experts, self.options.jitter, noisy, layer, seed, device, dtype)
        self.experts = Experts(num_experts, dim, hidden_dim, device, dtype)
        self.shared = SwiGLU(dim, shared_dim, device, dtype) if shared_dim else None
        self.register_buffer(
            "balance_bias", torch.zeros(num_experts, device=device) if self.options.balance_bias else None
        )
        self.load_since_update: Tensor | int = 0  # choices per expert since the last `update_balance_bias`
        if not self.router.weight.is_meta:
            initialize(self, ModelConfig(num_layers=1), seed)

    def forward(
        self,
        x: Tensor,
        indices: Tensor | None = None,
        sample_ids: Tensor | None = None,
        step: int = 0,
    ) -> tuple[Tensor, MoEMetrics]:
        if x.dim() == 2:
            y, metrics = self(x[None], indices, sample_ids, step)
            return y[0], metrics
        if self.overrides.gather_tokens is not None:
            x = self.overrides.gather_tokens(x)
        B, T, _ = x.shape
        indices = torch.arange(T, device=x.device) if indices is None else indices
        sample_ids = torch.arange(B, device=x.device) if sample_ids is None else sample_ids
        logits = self.router(x, indices, sample_ids, step)
        groups = RoutingGroups(B, T, self.options.group_tokens or max(1, T))
        randomly = self.training and self.options.random_second
        draw = self.router.draw_second(indices, sample_ids, step) if randomly else None
        routing = self.route(logits, groups, draw)
        y = self._apply_experts(self._copy_input(x).flatten(0, 1), routing, groups).unflatten(0, (B, T))
        if self.overrides.reduce_output is not None:
            y = self.overrides.reduce_output(y)
        return y, self._make_metrics(logits, routing, groups)

    def _copy_input(self, x: Tensor) -> Tensor:
        """Apply the override `copy_input`, by which tensor parallelism inserts its copy operator."""
        return x if self.overrides.copy_input is None else self.overrides.copy_input(x)

    def route(self, logits: Tensor, groups: RoutingGroups, draw: Tensor | None = None) -> Routing:
        """Let tokens [B, T, E] choose experts, or the reverse, and keep the choices within the capacity."""
        options, E, real = self.options, self.options.num_experts, groups.real(logits.device)
        probs, capacity = logits.softmax(-1), options.capacity(groups.size)
        if options.router == "expert_choice":
            weight = groups.split(probs)
            expert, place = expert_choice(weight.detach(), real, capacity)
        else:
            expert, weight = choose_experts(logits, probs, options, self.balance_bias, draw)
            expert, weight = groups.split(expert, fill=E), groups.split(weight)
            priority = weight.detach().log() if options.drop_order == "weight" else None
            place = position_in_expert(expert, E, priority)
        kept = (expert < E) & (place < capacity)
        load, kept_load = (
            F.one_hot(e.flatten(1), E + 1).sum(1)[:, :E] for e in (expert, expert.masked_fill(~kept, E))
        )
        expert, place, kept, weight = (groups.join(t) for t in (expert, place, kept, weight))
        return Routing(expert, place, kept, weight, load, kept_load)

    def _apply_experts(self, x: Tensor, routing: Routing, groups: RoutingGroups) -> Tensor:
        """Apply the kept experts to the tokens, and sum their outputs: [M, D] -> [M, D]."""
        plan, weight = self._plan(routing, groups), self._copy_input(routing.weight)
        dispatched: Dispatched
        if self.overrides.dispatch_tokens is not None:
            dispatched = self.overrides.dispatch_tokens(x, weight, plan)
        else:
            dispatched = RowPerChoice(x, weight, plan, self.overrides.dispatch or LocalDispatch)
        shared = None if self.shared is None else self.shared(x)  # computed while the rows are being sent
        y = dispatched.through(self.experts)
        return y if shared is None else y + shared

    def _plan(self, routing: Routing, groups: RoutingGroups) -> PermutePlan:
        expert, kept, E = routing.expert, routing.kept, self.options.num_experts
        if not self.overrides.pad_to_capacity or self.options.capacity_factor is None:
            return plan_kept_rows(expert, kept, E)
        capacity = min(self.options.capacity(groups.size), groups.tokens)
        of_tokens = groups.of_tokens(expert.device)
        return plan_padded_rows(expert, kept, routing.place, of_tokens, E, groups.number, capacity)

    def _make_metrics(self, logits: Tensor, routing: Routing, groups: RoutingGroups) -> MoEMetrics:
        options, real = self.options, groups.real(logits.device)
        probs = logits.softmax(-1)
        num_groups = max(1, groups.number if self.num_groups is None else self.num_groups)
        balance = logits.new_zeros(())
        if options.router != "expert_choice":  # under expert choice, loads are even by construction
            sums = groups.split(probs).sum(1)
            balance = balance_losses(routing.load, sums, real.sum(1), options.balance_coef).sum() / num_groups
        z = z_losses(groups.split(logits), real, options.z_coef).sum() / num_groups
        metrics = MoEMetrics(
            balance_loss=balance,
            z_loss=z,
            load=routing.load.sum(0),
            kept_load=routing.kept_load.sum(0),
            tokens=groups.batch * groups.tokens,
            unserved=(~routing.kept.any(1)).sum(),
            entropy_sum=torch.special.entr(probs.detach()).sum(),
        )
        self._record_metrics(metrics.detach())
        return metrics

    def _record_metrics(self, metrics: MoEMetrics) -> None:
        self.metrics = metrics if self.metrics is None else self.metrics + metrics
        if self.training and self.balance_bias is not None:
            self.load_since_update = self.load_since_update + metrics.load


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Return the MoE layers inside `model`, as pairs (name, module)."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, MoE))


def set_num_groups(model: nn.Module, num_groups: int | None, loss_scale: float = 1.0) -> None:
    """Tell every MoE layer the number of routing groups in the whole batch (`config.num_groups(batch, seq_len)`).

    Required if the model is called on parts of a batch (microbatches, or this rank's samples): an auxiliary loss is the
    mean over all groups of the batch. `loss_scale` is the factor that multiplies the loss before its backward, if any.
    """
    for _, moe in moe_layers(model):
        moe.num_groups, moe.loss_scale = num_groups, loss_scale


def take_metrics(model: nn.Module) -> dict[str, MoEMetrics]:
    """Return each MoE layer's metrics since the last call, by name, and reset them."""
    taken = {name: moe.metrics for name, moe in moe_layers(model) if moe.metrics is not None}
    for _, moe in moe_layers(model):
        moe.metrics = None
    return taken


@torch.no_grad()
def update_balance_bias(model: nn.Module, rate: float = 1e-3, comm: Comm | None = None) -> None:
    """Raise the bias of each expert whose load since the last update is below the mean; lower the bias of those above it.

    bias_e += rate * sign(mean load - load_e), over the tokens of all ranks of `comm`. Loads are integers, so every
    layout gives the same biases. Call it after each optimizer step.
    Source: arXiv:2408.15664, algorithm 1.
    """
    for _, moe in moe_layers(model):
        if moe.balance_bias is None:
            continue
        load = moe.load_since_update + torch.zeros_like(moe.balance_bias, dtype=torch.int64)
        load = load if comm is None else comm.all_reduce(load)
        moe.balance_bias += rate * (load.sum() - load * len(load)).sign()
        moe.load_since_update = 0
