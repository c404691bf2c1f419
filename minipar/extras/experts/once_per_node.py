"""Dispatch that sends a token to each node once, and copies it there to its experts: fewer bytes across nodes.

    across nodes    send one row for each (token, node), with the token's k router weights and expert indices, to the rank
                    with the same local rank in that node
    inside a node   send one row for each of the token's experts there, like `AllToAll`; the outputs come back, and are
                    weighted and summed
    across nodes    send this partial sum back in one row; the token's own rank adds the partial sums of all nodes

`AllToAll` sends k rows per token, whichever nodes they go to. Here, a token costs one row for each other node where it has
an expert. That is at most min(k, M) rows if the router limits a token to M nodes (`nodes_per_token`) and expert_nodes is a
multiple of the number of real nodes.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.3; DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minipar.comm import Comm
from minipar.expert.dispatch import AllToAll
from minipar.expert.overlapped_all_to_all import AllToAllRoute
from minipar.extras.experts.chunked_rows import ChunkedAllToAll
from minipar.model.overrides import ExpertFunction
from minipar.model.permute import PermutePlan, RowPerChoice, combine, permute_rows, plan_kept_rows


class NodeDedupDispatch:
    """The `dispatch_tokens` of an `MoE` layer. Each rank of `comm` has num_experts / ep consecutive experts of the layer.

    x, weight  [M, D], [M, k]    M may differ between ranks, and may be 0
    plan       has a row for each kept choice, that is, each (token, expert) that was not dropped
    node_size  ranks per node, g: consecutive ranks, as in `AllToAllRoute`
    overlap    send rows across nodes while the caller computes the shared expert, and gradients while its backward runs
    chunks     number of chunks of the rows inside a node: see `chunked_rows.py`

    If this rank sends S rows to other nodes and receives R rows from them, it sends across nodes

        forward    S (D + k) + R D elements, 4 k S bytes of expert indices, and 8 N bytes of counts to each other node
        backward   S D + R (D + k) elements

    with N = ep/g nodes. Inside its node it sends the same rows as `AllToAll` would for the R received tokens and its own.
    Results equal those of one process up to rounding, because a token's results are added node by node.
    """

    def __init__(self, comm: Comm, node_size: int, overlap: bool = False, chunks: int = 1):
        levels = AllToAllRoute(comm, node_size)
        self.num_nodes = comm.size // node_size
        self.across = AllToAll(levels.across, overlap)
        self.inside = ChunkedAllToAll(levels.inside, chunks) if chunks > 1 else AllToAll(levels.inside)

    def __call__(self, x: Tensor, weight: Tensor, plan: PermutePlan) -> DispatchedTokens:
        return DispatchedTokens(self, x, weight, plan)


class DispatchedTokens:
    """Tokens on their way to the nodes of their experts."""

    def __init__(self, levels: NodeDedupDispatch, x: Tensor, weight: Tensor, plan: PermutePlan):
        self.levels, self.width = levels, x.shape[1]
        self.experts_each = len(plan.counts) // levels.num_nodes
        expert = expert_of_choices(plan)
        self.plan = plan_nodes(expert, self.experts_each, levels.num_nodes)
        rows = permute_rows(torch.cat((x, weight.to(x.dtype)), 1), self.plan)
        self.dispatched = levels.across(rows, self.plan.counts)
        self.experts = self._send(experts_at_nodes(expert, self.experts_each, self.plan))

    def _send(self, expert: Tensor) -> Any:
        """Send the expert indices of each row to the row's destination; return a handle for those that arrive here."""
        comm, between = self.levels.across.comm, self.dispatched.between
        received = [source[comm.rank] for source in between]
        return comm.all_to_all(expert, between[comm.rank], received, async_op=True)

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, [M, D]."""
        rows, _ = self.dispatched.receive()
        expert = self.experts.wait().long()
        x, weight = torch.split(rows, [self.width, expert.shape[1]], 1)
        of_node = plan_kept_rows(expert, expert < self.experts_each, self.experts_each)
        part = RowPerChoice(x, weight, of_node, self.levels.inside).through(experts)
        parts = self.dispatched.combine(part)
        return combine(parts, parts.new_ones(self.plan.row.shape), self.plan)


def expert_of_choices(plan: PermutePlan) -> Tensor:
    """Return each choice's expert, [M, k]; a dropped choice gets num_experts, which is no index."""
    expert = torch.bucketize(plan.row, plan.counts.cumsum(0), right=True)
    return expert.masked_fill(plan.row < 0, len(plan.counts))


def plan_nodes(expert: Tensor, experts_each: int, num_nodes: int) -> PermutePlan:
    """Plan one row for each (token, node with an expert of the token), sorted by node, then by token.

    `plan_kept_rows` makes the plan, with nodes in place of experts: choice t * num_nodes + n is token t's row for node n.
    """
    node = torch.arange(num_nodes, device=expert.device)
    used = (expert[:, :, None].div(experts_each, rounding_mode="floor") == node).any(1)
    return plan_kept_rows(node.expand_as(used), used, num_nodes)


def experts_at_nodes(expert: Tensor, experts_each: int, nodes: PermutePlan) -> Tensor:
    """Return the indices of each row's experts, counted from the first expert of the row's node, int32 [R, k].

    An expert of another node, or a dropped choice, gets the number of experts per node, which is no index.
    """
    num_nodes = nodes.row.shape[1]
    token, node = nodes.choice.div(num_nodes, rounding_mode="floor"), nodes.choice % num_nodes
    local = expert[token] - (node * experts_each)[:, None]
    elsewhere = (local < 0) | (local >= experts_each)
    return local.masked_fill(elsewhere, experts_each).int()
