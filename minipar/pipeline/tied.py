"""A weight that the first and the last stage share: each computes a part of its gradient, and both need the sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.pipeline.stage import Stage
from minipar.schedules.schedule import Schedule


class TiedGradients:
    """Sums the gradients of the first stage's embedding and its copy, the last stage's head (`Transformer.tied_copies`).

    embedding.grad = head.grad = (gradient as embedding) + (gradient as head)

    Runs after both stages' last backward, and after each stage's replicas have summed their gradients; the order of these
    sums does not matter. But it must run before gradients are sharded, because the two stages would shard the weight at
    different offsets. Only this step's gradients are summed; gradients of earlier steps are summed already, and are added
    afterwards. Both ranks add in the same order, so equal weights stay equal bit for bit.
    Sends V * D elements each way; nothing where one rank holds both stages, as in a V schedule.
    Whether the weight is trained is asked anew in each step; both stages must agree on it.
    Raises ValueError if the weight is trained and held as a flat shard.
    """

    def __init__(self, comm: Comm, schedule: Schedule, stages: list[Stage]):
        ends = schedule.stage_rank[0], schedule.stage_rank[-1]
        tied = (_tied_parameter(stage, schedule.num_stages) for stage in stages)
        self._tied = [t for t in tied if t is not None]  # this rank's: the embedding, the head, or both
        self._parameters = self._trained()  # those that this step trains
        self._before: list[Tensor | None] = []
        self._comm = None
        if self._tied and ends[0] != ends[1]:
            self._comm = comm.subgroup(ends, "tied")

    def begin(self) -> None:
        """Save a copy of `.grad`, which may be a view of a bucket that the step refills, and clear it."""
        self._parameters = self._trained()
        self._before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    def restore(self) -> None:
        """Write the saved `.grad` back, after a step that failed."""
        for p, before in zip(self._parameters, self._before):
            p.grad = before

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the gradients between the two ranks, and write their sum into `.grad`."""
        if not self._parameters:
            return
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if self._comm is not None:  # otherwise this rank holds both
            (mine,), me = parts, self._comm.rank
            theirs = self._comm.exchange(mine, 1 - me, mine.shape, mine.dtype, 1 - me)
            parts = [mine, theirs] if me == 0 else [theirs, mine]
        total = sum(parts[1:], parts[0])
        for p, before in zip(self._parameters, self._before):
            value = total if before is None else before + total
            p.grad = value.clone() if p.grad is None else p.grad.copy_(value)

    def _trained(self) -> list[nn.Parameter]:
        """Return the tied weights that are trained now. Raises ValueError for a flat shard."""
        trained = [(name, p) for name, p in self._tied if p.requires_grad]
        for name, p in trained:
            if p.dim() != 2:
                raise ValueError(
                    f"{name}, tied to the other end of the pipeline, is a flat shard of {p.numel()} elements; keep it "
                    "whole (FSDP: shard_rest=False)"
                )
        return [p for _, p in trained]


def _tied_parameter(stage: Stage, num_stages: int) -> tuple[str, nn.Parameter] | None:
    """Return the name and the tied weight of this stage, None if it has none."""
    model = stage.transformer
    if model is None or not model.config.tie_embeddings or num_stages == 1:
        return None
    name = "embedding.weight" if stage.number == 0 else next(iter(model.tied_copies), None)
    return None if name is None else (name, model.get_parameter(name))
