"""Expert parallelism in serving: the experts of every MoE layer are split over the ep ranks, and a step has few tokens.

`minipar.expert.expert_parallel` splits the experts, as in training. How tokens reach them depends on which ranks have
the tokens:

every ep rank has all tokens   cp is 1. Each rank computes the share of its own experts, and the shares are summed by one
                               all-reduce of N D elements per MoE layer: each rank sends 2 (ep - 1) / ep N D, whatever k
                               is. With few tokens the number of messages dominates the cost, and an all-reduce, unlike
                               an all-to-all, needs no message with counts before the rows.
each rank has its own tokens   ep divides cp (`split_keys.py`). Rows go to their experts' ranks and back by all-to-all,
                               as in training: 2 D elements for each choice of an expert on another rank, and 8 E bytes of
                               counts from every rank to every other rank.

Without cp the ep ranks hold the same cache and compute the same attention, so ep saves memory only for the experts. With
cp they also split the cache and the attention, at the cost of the messages of attention.
Source: GShard, arXiv:2006.16668, section 3, for the all-to-all.
"""

from __future__ import annotations

from torch import Tensor

from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.mesh import Mesh
from minipar.model.moe import MoE, moe_layers
from minipar.model.overrides import ExpertFunction
from minipar.model.permute import PermutePlan, RowPerChoice
from minipar.model.transformer import Transformer
from minipar.support.errors import require_divides


def own_plan(plan: PermutePlan, first: int, num_experts: int) -> PermutePlan:
    """Return the part of `plan` for experts first, ..., first + num_experts - 1, without the rows of other experts."""
    begin = int(plan.counts[:first].sum())
    counts = plan.counts[first : first + num_experts]
    end = begin + int(counts.sum())
    is_own = (plan.row >= begin) & (plan.row < end)
    return PermutePlan(plan.choice[begin:end], (plan.row - begin).masked_fill(~is_own, -1), counts)


class OwnShare:
    """Dispatches tokens that every ep rank has to this rank's experts: a `dispatch_tokens` of `MoEOverrides`.

    x  [N, D], weight  [N, k]    the same on all ranks of `ep`
    """

    def __init__(self, ep: Comm, x: Tensor, weight: Tensor, plan: PermutePlan):
        own = len(plan.counts) // ep.size
        self.ep, self.x, self.weight = ep, x, weight
        self.plan = own_plan(plan, ep.rank * own, own)

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return, for each token, the weighted sum of the outputs of its experts on all ranks, [N, D]."""
        if len(self.plan.choice):
            share = RowPerChoice(self.x, self.weight, self.plan).through(experts)
        else:
            share = self.x.new_zeros(self.x.shape)
        y: Tensor = self.ep.all_reduce(share)
        return y


def check_expert_parallel(config: ModelConfig, ep: int, cp: int = 1) -> None:
    """Raise ValueError if this model cannot be served with experts split over ep ranks and tokens over cp ranks."""
    if ep == 1:
        return
    if not config.num_experts:
        raise ValueError(f"ep={ep}: this model has no experts to spread; use ep=1")
    require_divides("ep", ep, "num_experts", config.num_experts)
    if cp > 1:
        require_divides("ep", ep, "cp", cp)


def spread_mixtures(model: Transformer, mesh: Mesh | None) -> list[MoE]:
    """Return the MoE layers whose experts are split over the ep ranks of this mesh.

    Raises ValueError if the model cannot be served on this mesh, or if `expert_parallel` has not split its experts.
    """
    if mesh is None or mesh.sizes["ep"] == 1:
        return []
    ep = mesh.sizes["ep"]
    check_expert_parallel(model.config, ep, mesh.sizes["cp"])
    mixtures = [moe for _, moe in moe_layers(model)]
    for moe in mixtures:
        here, there = len(moe.experts.gate), moe.options.num_experts
        if here * ep != there:
            raise ValueError(
                f"a rank has {here} of num_experts={there} experts, the mesh ep={ep}; "
                f"call expert_parallel(model, mesh.comm('ep')) first"
            )
    return mixtures
