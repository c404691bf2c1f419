"""Dispatch of tokens that sends each token to a node once, and copies it there to its experts: fewer bytes across nodes.

    across    a row for each (token, node), with the token's k weights and experts, to the rank with this rank's place there
    inside    there, a row for each choice to the rank of its expert, as `AllToAll` sends it; the results come back to be
              weighted and summed
    across    the node's part of the token's sum back, in one row; at home the nodes' parts are added

`AllToAll` sends k rows per token, whatever nodes they go to. Here a token costs as many rows as it uses other nodes: at
most min(k, M) where the router limits it to M nodes (`nodes_per_token`), if expert_nodes is a multiple of the real nodes.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.3; DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minipar.expert.dispatch import AllToAll
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.model.permute import PermutePlan, RowPerChoice, combine, permute_rows, plan_kept_rows


class OncePerNode:
    """The `dispatch_tokens` of an `MoE` layer of which each rank of `comm` has num_experts / ep consecutive experts.

    x, weight  [M, D], [M, k]    M may differ between ranks, and may be 0
    plan       a row for each kept choice
    node_size  ranks per node, g: consecutive ranks, as in `AllToAllRoute`
    overlap    send rows across nodes while the caller computes the shared expert, and gradients while its backward runs
    chunks     of the rows inside a node: see `dispatched_rows.py`

    Where this rank's tokens use other nodes S times in all, and those that come to it R times, it sends across nodes

        forward    S (D + k) + R D elements, and 4 k S bytes of experts       each way besides 8 N bytes of counts to each
        backward   S D + R (D + k) elements                                   other of the N = ep/g nodes, forward

    and inside its node what `AllToAll` sends there, for the choices of the R tokens and of its own.
    Results are those of one process to rounding: a token's results are added node by node.
    """

    def __init__(self, comm, node_size: int, overlap: bool = False, chunks: int = 1):
        levels = AllToAllRoute(comm, node_size)
        self.num_nodes = comm.size // node_size
        self.across, self.inside = AllToAll(levels.across, overlap), AllToAll(levels.inside, chunks=chunks)

    def __call__(self, x: Tensor, weight: Tensor, plan: PermutePlan) -> DispatchedTokens:
        return DispatchedTokens(self, x, weight, plan)


class DispatchedTokens:
    """Tokens on their way to the nodes of their experts."""

    def __init__(self, levels: OncePerNode, x: Tensor, weight: Tensor, plan: PermutePlan):
        self.levels, self.width = levels, x.shape[1]
        self.experts_each = len(plan.counts) // levels.num_nodes
        expert = expert_of_choices(plan)
        self.plan = plan_nodes(expert, self.experts_each, levels.num_nodes)
        rows = permute_rows(torch.cat((x, weight.to(x.dtype)), 1), self.plan)
        self.dispatched = levels.across(rows, self.plan.counts)
        self.experts = self._send(experts_at_nodes(expert, self.experts_each, self.plan))

    def _send(self, expert: Tensor):
        """Send each row's experts where the row goes; return the handle of those that arrive."""
        comm, between = self.levels.across.comm, self.dispatched.between
        received = [source[comm.rank] for source in between]
        return comm.all_to_all(expert, between[comm.rank], received, async_op=True)

    def through(self, experts: Callable) -> Tensor:
        """Return the weighted sum of what `experts` make of each token, [M, D]."""
        rows, _ = self.dispatched.receive()
        expert = self.experts.wait().long()
        x, weight = rows.split((self.width, expert.shape[1]), 1)
        of_node = plan_kept_rows(expert, expert < self.experts_each, self.experts_each)
        part = RowPerChoice(x, weight, of_node, self.levels.inside).through(experts)
        parts = self.dispatched.combine(part)
        return combine(parts, parts.new_ones(self.plan.row.shape), self.plan)


def expert_of_choices(plan: PermutePlan) -> Tensor:
    """Return each choice's expert, [M, k]: the number of experts for a dropped choice."""
    expert = torch.bucketize(plan.row, plan.counts.cumsum(0), right=True)
    return expert.masked_fill(plan.row < 0, len(plan.counts))


def plan_nodes(expert: Tensor, experts_each: int, num_nodes: int) -> PermutePlan:
    """Plan one row for each (token, node with an expert of the token), sorted by node, then by token.

    The maps are those of `plan_kept_rows`, with nodes as experts: choice t * num_nodes + n is token t's row for node n.
    """
    node = torch.arange(num_nodes, device=expert.device)
    used = (expert[:, :, None].div(experts_each, rounding_mode="floor") == node).any(1)
    return plan_kept_rows(node.expand_as(used), used, num_nodes)


def experts_at_nodes(expert: Tensor, experts_each: int, nodes: PermutePlan) -> Tensor:
    """Return the experts of each of a plan's rows, counted from its node's first, int32 [R, k].

    For those of another node, and for none, the number of experts of a node.
    """
    num_nodes = nodes.row.shape[1]
    token, node = nodes.choice.div(num_nodes, rounding_mode="floor"), nodes.choice % num_nodes
    local = expert[token] - (node * experts_each)[:, None]
    elsewhere = (local < 0) | (local >= experts_each)
    return local.masked_fill(elsewhere, experts_each).int()
