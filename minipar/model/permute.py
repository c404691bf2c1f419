"""Copy tokens to their experts' rows and combine the results. Two index maps make every step a gather.

A choice is one (token, expert) pair; token t's j-th choice has the number t * k + j. A plan maps each row to its choice,
and each choice to its row. With both maps, forward and backward may read rows in any order but write them in sequence, so
no two writes go to the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.model.overrides import Dispatched, ExpertFunction


class PermutePlan(NamedTuple):
    """The maps between choices and rows; rows are sorted by expert.

    choice  [R]     each row's choice, -1 for an unused row
    row     [M, k]  each choice's row, -1 for a dropped choice
    counts  [E]     rows per expert
    """

    choice: Tensor
    row: Tensor
    counts: Tensor


def plan_kept_rows(expert: Tensor, kept: Tensor, num_experts: int) -> PermutePlan:
    """Plan one row for each kept choice, sorted by expert, then by token.

    expert, kept  [M, k]
    """
    target = expert.masked_fill(~kept, num_experts).flatten()
    counts = target.new_zeros(num_experts + 1).scatter_add_(0, target, torch.ones_like(target))[:num_experts]
    choice = target.argsort(stable=True)[: int(counts.sum())]
    row = torch.full_like(target, -1)
    row[choice] = torch.arange(len(choice), device=row.device)
    return PermutePlan(choice, row.view_as(expert), counts)


def plan_padded_rows(
    expert: Tensor,
    kept: Tensor,
    place: Tensor,
    group: Tensor,
    num_experts: int,
    num_groups: int,
    capacity: int,
) -> PermutePlan:
    """Plan `capacity` rows for every expert and group, used or not, so that sizes are known before routing.

    expert, kept, place  [M, k]    group  [M]
    row of a choice = (expert * num_groups + group) * capacity + place        place: its position in the expert's queue
    """
    row = ((expert * num_groups + group[:, None]) * capacity + place).masked_fill(~kept, -1)
    rows_each = num_groups * capacity
    choice = torch.full((num_experts * rows_each + 1,), -1, device=row.device)
    # Row -1 is the extra last row, which is cut off below.
    choice[row.flatten()] = torch.arange(row.numel(), device=row.device)
    return PermutePlan(choice[:-1], row, torch.full((num_experts,), rows_each, device=row.device))


def permute_rows(x: Tensor, plan: PermutePlan) -> Tensor:
    """Copy each token to the rows of its choices: rows_r = x_t, or 0 for an unused row r.

    x  [M, D]    rows  [R, D]

    backward   dx_t = sum of drows over the rows of t's choices     [M, D]
    """
    rows: Tensor = _PermuteRows.apply(x, plan)  # type: ignore[no-untyped-call]
    return rows


def combine(out: Tensor, weight: Tensor, plan: PermutePlan) -> Tensor:
    """Sum each token's expert outputs, weighted: y_t = sum over its kept choices j of weight_tj out_row(t,j).

    out  [R, D]    weight  [M, k]    y  [M, D]      0 for a token without a kept choice

    backward   dout_r = weight_tj dy_t           [R, D]
               dweight_tj = <dy_t, out_row>      [M, k]
    """
    y: Tensor = _Combine.apply(out, weight.to(out.dtype), plan)  # type: ignore[no-untyped-call]
    return y


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: PermutePlan) -> Tensor:
        ctx.plan = plan
        return _gather_or_zero(x, _token_of_row(plan))

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        return _sum([_gather_or_zero(drows, row) for row in ctx.plan.row.unbind(1)]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, weight: Tensor, plan: PermutePlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(out, weight)
        of_choices = zip(plan.row.unbind(1), weight.unbind(1))
        return _sum([_gather_or_zero(out, row) * w[:, None] for row, w in of_choices])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (out, weight), plan = ctx.saved_tensors, ctx.plan
        dout = _gather_or_zero(dy, _token_of_row(plan)) * _gather_or_zero(weight.reshape(-1, 1), plan.choice)
        if not ctx.needs_input_grad[1]:
            return dout, None, None
        dweight = [(dy * _gather_or_zero(out, row)).sum(1) for row in plan.row.unbind(1)]
        return dout, torch.stack(dweight, 1), None


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


def _token_of_row(plan: PermutePlan) -> Tensor:
    """Return each row's token, -1 for an unused row."""
    return plan.choice.div(plan.row.shape[1], rounding_mode="floor")


def _gather_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], 0 where the index is -1."""
    missing = index < 0
    if not missing.is_cuda and not missing.any():  # on a GPU, any() takes longer than masking
        return x.index_select(0, index)
    return x.index_select(0, index.clamp(min=0)).masked_fill_(missing[:, None], 0)


class LocalDispatch(NamedTuple):
    """Rows dispatched to experts that are all on this rank: no communication.

    rows    [R, D], sorted by expert
    counts  [E] rows per expert
    """

    rows: Tensor
    counts: Tensor

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return the experts' outputs, [R, D]."""
        return experts(self.rows, self.counts)


class RowPerChoice:
    """Tokens sent to their experts, one row for each choice that was kept.

    x         [M, D]  the tokens
    weight    [M, k]  the weight of each choice
    dispatch  sends rows to their experts: (rows, counts per expert) -> the dispatched rows, such as a `LocalDispatch`
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        plan: PermutePlan,
        dispatch: Callable[[Tensor, Tensor], Dispatched] = LocalDispatch,
    ):
        self.weight, self.plan = weight, plan
        self.dispatched = dispatch(permute_rows(x, plan), plan.counts)

    def through(self, experts: ExpertFunction) -> Tensor:
        """Return the weighted sum of each token's expert outputs, [M, D]."""
        return combine(self.dispatched.through(experts), self.weight, self.plan)
