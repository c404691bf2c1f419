"""Routers: score the experts for each token, and choose experts for tokens or tokens for experts.

A router scores every expert for every token. Then either each token takes its best experts (`token_choice`), or each
expert takes its best tokens (`expert_choice`). A tie goes to the expert, or the token, with the lower number.

Equal tokens, and experts that started equal, have scores that are equal up to rounding, and rounding depends on the mesh.
So `tie_ranks` treats nearly equal scores as ties, and every mesh makes the same choices.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from minipar.config.moe_config import MoEConfig
from minipar.model.counter_dropout import uniform
from minipar.model.deferrable_linear import Linear, WeightGradients, linear
from minipar.model.value_check import assert_async

# Numbers that tell a layer's random draws apart; dropout uses 0 and 1.
JITTER_SITE, NOISE_SITE, SECOND_SITE = 2, 3, 4


class Router(nn.Module):
    """Score the experts: logits = x w^T, in float32 or wider whatever the dtype of x.

    x  [B, T, D]    w  [E, D]    logits  [B, T, E]

    jitter > 0   in training, x is first *multiplied* by uniform numbers from [1 - jitter, 1 + jitter]
    noisy        in training, logits + normal * softplus(x w_noise^T): the standard deviation of the noise is learned
    `layer` and `seed` key the random numbers, which depend on sample, index and step, not on the rank that draws them.

    Raises ValueError if a logit is nan or infinite in training; in evaluation such a token's logits and output are nan.
    Source: arXiv:2101.03961, section 2.4 (float32) and appendix C (jitter); arXiv:1701.06538, equation 4 (noise).
    """

    deferred: WeightGradients | None = None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        jitter: float = 0.0,
        noisy: bool = False,
        layer: int = 0,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=wide))
        self.jitter, self.layer, self.seed = jitter, layer, seed
        self.noise = Linear(dim, num_experts, device=device, dtype=wide) if noisy else None

    def forward(self, x: Tensor, indices: Tensor, sample_ids: Tensor, step: int = 0) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        tokens = step, indices, sample_ids
        if self.training and self.jitter > 0:
            x = x * (1 + self.jitter * (2 * self._uniform(x.shape[-1], JITTER_SITE, *tokens).to(x.dtype) - 1))
        logits = linear(x, self.weight.to(x.dtype), None, self.deferred)
        if self.training and self.noise is not None:
            normal = torch.special.ndtri(self._uniform(logits.shape[-1], NOISE_SITE, *tokens)).to(x.dtype)
            width = linear(x, self.noise.weight.to(x.dtype), None, self.noise.deferred)
            logits = logits + normal * F.softplus(width)
        if self.training:
            _require_finite(logits)
            return logits
        # A request with nan must not end the service of the others: its own output becomes nan, also for an inf.
        return logits.masked_fill(~logits.isfinite().all(-1, keepdim=True), math.nan)

    def draw_second(self, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        """Return a number uniform in (0, 1) for each token, float64 [B, T], for `random_second`."""
        return self._uniform(1, SECOND_SITE, step, indices, sample_ids).squeeze(-1)

    def _uniform(
        self, num_features: int, site: int, step: int, indices: Tensor, sample_ids: Tensor
    ) -> Tensor:
        return uniform(num_features, (self.seed, step, self.layer, site), sample_ids, indices)


# A difference of logits or of probabilities. Rounding changes a score by about 1e-6 in float32, by much less in float64.
TIE_TOLERANCE = 2.0**-17


def tie_ranks(scores: Tensor, dim: int) -> Tensor:
    """Return each score's rank along `dim`, 0 for the largest.

    scores, ranks  any shape; scores may be -inf

    A score at most `TIE_TOLERANCE` below the next larger score gets the same rank as that score. Rounding errors change a
    rank only where they move a difference across the tolerance. If scores were rounded to a grid instead, errors would
    change ranks wherever equal scores lie at a boundary of the grid.
    """
    ordered = scores.sort(dim=dim, descending=True)
    # roll wraps around: the largest score is compared with the smallest, which is not larger, and so gets rank 0.
    larger = ordered.values.roll(1, dim)
    ranks = (larger - ordered.values > TIE_TOLERANCE).cumsum(dim)
    return torch.empty_like(ranks).scatter_(dim, ordered.indices, ranks)


def token_choice(probs: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return each token's `top_k` best experts by score, best first, and the weights of their outputs.

    probs, scores  [..., E]    expert, weight  [..., k]

    k = 1   weight = p                  (Switch: the router learns through the weight)
    k > 1   weight = p / sum of its k p's     (GShard, Mixtral: the outputs are averaged)

    Source: arXiv:2101.03961, equation 2; GShard, arXiv:2006.16668, section 2.2.
    """
    expert = tie_ranks(scores, dim=-1).sort(dim=-1, stable=True).indices[..., :top_k]
    weight = probs.gather(-1, expert)
    return expert, weight if top_k == 1 else weight / weight.sum(-1, keepdim=True)


def random_second(expert: Tensor, weight: Tensor, draw: Tensor, num_experts: int) -> Tensor:
    """Leave out each token's second expert at random; return the experts, with `num_experts` for a left-out expert.

    expert, weight  [..., 2]
    draw            [...]     uniform in (0, 1), counter-based, so that every mesh leaves out the same experts

    The second expert is used if 2 weight_2 > draw: always if the two weights are equal, rarely if weight_2 is small. If it
    is left out, its capacity is free for other tokens and no row is sent to it. So second experts get 2 E[weight_2] rows
    per token on average instead of 1.
    Source: GShard, arXiv:2006.16668, section 2.2 and algorithm 1.
    """
    used = 2 * weight.detach()[..., 1].double() > draw
    return torch.stack((expert[..., 0], expert[..., 1].masked_fill(~used, num_experts)), -1)


def on_best_nodes(affinity: Tensor, top_k: int, num_nodes: int, nodes_per_token: int) -> Tensor:
    """Return, for each token, the mask of the experts on its M best nodes.

    affinity  [..., E]  probabilities, with the balance bias added if there is one
    returns   [..., E]  bool; M = nodes_per_token

    Node n of N has experts n*E/N ... (n+1)*E/N - 1. A node's score is the sum of the affinities of its ceil(k/M) best
    experts.

    Suppose that a dispatch sends a token once to each other node that has one of the token's experts. Then at most
    min(k, M) rows of D elements per token go between nodes. If all nodes are used equally, the average is (N-1)/N times
    the mean number of nodes per token (see `nodes_used`). `AllToAll` sends at most k rows, one per expert. Without a limit,
    k experts drawn with equal probability are on N (1 - C(E - E/N, k) / C(E, k)) nodes on average.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.3; the node's score: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    by_node = torch.unflatten(affinity, -1, (num_nodes, -1))
    score = by_node.topk(-(-top_k // nodes_per_token), dim=-1).values.sum(-1)
    best = tie_ranks(score, dim=-1).sort(dim=-1, stable=True).indices[..., :nodes_per_token]
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
    return chosen[..., None].expand_as(by_node).flatten(-2)


def nodes_used(expert: Tensor, num_experts: int, num_nodes: int) -> Tensor:
    """Return the number of nodes with a token's experts: [..., k] -> [...]. In `expert`, `num_experts` means no expert."""
    node = expert.div(num_experts // num_nodes, rounding_mode="floor")
    return F.one_hot(node, num_nodes + 1)[..., :num_nodes].amax(-2).sum(-1)


def choose_experts(
    logits: Tensor, probs: Tensor, options: MoEConfig, bias: Tensor | None = None, draw: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights, [..., k]: `token_choice` with the restrictions that `options` ask for.

    bias  [E]    added to the probabilities that choose the experts, not to the weights
    draw  [...]  None, or the random numbers for `random_second`
    """
    affinity = (probs if bias is None else probs + bias).detach()
    scores = logits.detach() if bias is None else affinity
    if options.expert_nodes is not None and options.nodes_per_token is not None:
        reachable = on_best_nodes(affinity, options.top_k, options.expert_nodes, options.nodes_per_token)
        scores = scores.masked_fill(~reachable, -math.inf)
    expert, weight = token_choice(probs, scores, options.top_k)
    if draw is not None:
        expert = random_second(expert, weight, draw, options.num_experts)
    return expert, weight


def position_in_expert(expert: Tensor, num_experts: int, priority: Tensor | None = None) -> Tensor:
    """Return each choice's position in its expert's queue, counted from 0 within its group.

    expert    [N, g, k]   `num_experts` for no expert
    priority  [N, g, k]   larger comes first, ties by token position; None: all by token position

    If choices are queued by token position, no choice depends on later tokens, so routing is causal; by priority it is not.
    Source: arXiv:2101.03961, section 2.2; arXiv:2106.05974, section 4.1 (batch prioritized routing).
    """
    queue = expert.flatten(1)
    if priority is not None:
        order = tie_ranks(priority.flatten(1), dim=1).sort(dim=1, stable=True).indices
        queue = queue.gather(1, order)
    before = F.one_hot(queue, num_experts + 1).cumsum(1) - 1
    place = before.gather(2, queue[..., None])[..., 0]
    if priority is not None:
        place = torch.empty_like(place).scatter_(1, order, place)
    return place.view_as(expert)


def expert_choice(probs: Tensor, real: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return each expert's `capacity` best tokens of a group, as choices of the tokens: one column per expert.

    probs  [N, g, E]    real  [N, g]: False for padding
    expert [N, g, E]    e in column e where expert e chose the token, else E
    place  [N, g, E]    the token's position in e's order of preference, below `capacity` where e chose it

    Every expert is full by construction; a token may be chosen by many experts or by none. Not causal: whether a token
    is chosen depends on later tokens.
    Source: arXiv:2202.09368, section 3.2.
    """
    num_experts = probs.shape[-1]
    ranks = tie_ranks(probs.log().masked_fill(~real[..., None], -math.inf), dim=1)
    ranked = ranks.sort(dim=1, stable=True).indices
    place = torch.empty_like(ranked)
    place.scatter_(1, ranked, torch.arange(probs.shape[1], device=probs.device)[:, None].expand_as(ranked))
    taken = (place < capacity) & real[..., None]
    numbers = torch.arange(num_experts, device=probs.device).expand_as(place)
    return numbers.masked_fill(~taken, num_experts), place


def _require_finite(logits: Tensor) -> None:
    finite = logits.detach().isfinite().all(-1)
    advice = "look for nan or inf in its input or its weight"
    if not assert_async(finite.all(), f"the router's logits are nan or infinite; {advice}"):
        bad = ~finite
        raise ValueError(
            f"the router's logits are nan or infinite for {int(bad.sum())} of {bad.numel()} tokens, the first at "
            f"{tuple(bad.nonzero()[0].tolist())}; {advice}"
        )
