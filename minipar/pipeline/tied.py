"""A weight that the first and the last stage share: each computes a part of its gradient, both need the sum."""

from __future__ import annotations

import torch
from torch import nn

from minipar.comm import Comm
from minipar.pipeline.stage import Stage
from minipar.schedules.schedule import Schedule


class TiedGradients:
    """The gradient of the first stage's embedding and of its copy, the last stage's head (`Transformer.tied_copies`).

    embedding.grad = head.grad = (gradient as embedding) + (gradient as head)

    Runs after both stages' last backward, and after each stage's replicas have summed their gradients: all are
    sums, so the order is free. But it must run before gradients are sharded, because the two stages would shard
    the weight at different places. Only this step's gradients are summed: those of earlier steps, which are summed
    already, are added afterwards. Both ranks add in the same order, so equal weights stay equal bit for bit.
    Sends V * D elements each way, nothing where one rank holds both stages: in a V, and with two copies of the model.
    Raises ValueError where the weight is held as a flat shard.
    """

    def __init__(self, comm: Comm, schedule: Schedule, stages: list[Stage]):
        first_rank, last_rank = schedule.stage_rank[0], schedule.stage_rank[-1]
        self._parameters: list[nn.Parameter] = []  # the first stage's, the last stage's, or both
        for stage in stages:
            name = _shared(stage, schedule.model_stages)
            parameter = None if name is None else stage.transformer.get_parameter(name)
            if parameter is not None and parameter.requires_grad:
                self._parameters.append(_require_whole(parameter, name))
        self._comm = None
        if self._parameters and first_rank != last_rank:
            self._comm = comm.subgroup((first_rank, last_rank), "tied")

    def begin(self) -> None:
        """Save a copy of `.grad`, which may be a view of a bucket that the step refills, and clear it."""
        self._before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the gradients between the two ranks, and write their sum into `.grad`."""
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if self._comm is None:
            parts = own  # this rank holds both, or neither
        else:
            (mine,), me = own, self._comm.rank
            theirs = self._comm.exchange(mine, 1 - me, mine.shape, mine.dtype, 1 - me)
            parts = [mine, theirs] if me == 0 else [theirs, mine]
        total = sum(parts[1:], parts[0]) if parts else None
        for p, before in zip(self._parameters, self._before):
            value = total if before is None else before + total
            p.grad = value.clone() if p.grad is None else p.grad.copy_(value)


def _shared(stage: Stage, num_stages: int) -> str | None:
    """Return the name of the tied weight in this stage, None if it has none."""
    model = stage.transformer
    if model is None or not model.config.tie_embeddings or num_stages == 1:
        return None
    if stage.number == 0:
        return "embedding.weight"
    return next(iter(model.tied_copies), None)


def _require_whole(parameter: nn.Parameter, name: str) -> nn.Parameter:
    if parameter.dim() != 2:
        raise ValueError(
            f"{name}, tied to the other end of the pipeline, is a flat shard of {parameter.numel()} elements; keep it "
            "whole (FSDP: shard_rest=False)"
        )
    return parameter
