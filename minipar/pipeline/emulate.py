"""Stages that sleep instead of computing, to run a schedule on fewer cores than it has ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.model import WeightGradients
from minipar.pipeline.execute import Pipeline
from minipar.schedules.costs import Costs
from minipar.schedules.schedule import HALVES, Action, Schedule
from minipar.schedules.timeline import Span


class EmulatedStage(nn.Module):
    """The identity function. It sleeps F seconds in the forward and I + W seconds in the backward; W can be deferred.

    Sleeping ranks don't compete for cores, so a laptop with two cores runs a pipeline of eight as eight GPUs would.
    """

    deferred: WeightGradients | None = None

    def __init__(self, forward_s: float, input_s: float, weight_s: float):
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage, ctx.deferred = stage, stage.deferred
        time.sleep(stage.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.stage.input_s)
        if ctx.deferred is None:
            time.sleep(ctx.stage.weight_s)
        else:
            ctx.deferred.put(lambda: time.sleep(ctx.stage.weight_s))
        return dy, None, None


def emulate(comm: Comm, schedule: Schedule, costs: Costs, steps: int = 2) -> dict[Action, Span]:
    """Run `steps` steps with stages that sleep as long as `costs` says; return this rank's spans of the last step.

    Call it on every rank of `comm`; `measured` turns the returned spans into a timeline. The first step, in which the
    ranks agree on shapes, is a little slower.
    Raises ValueError for a schedule whose microbatches do not all pass through all stages.
    """
    # A sleeping stage keeps nothing, so whatever work a schedule numbers can be microbatches.
    work = schedule.work()
    plain = Schedule(schedule.actions, schedule.stage_rank, 1 + max(k for _, k in work), schedule.name)
    if plain.work() != work:
        raise ValueError(
            f"schedule {schedule.name} is only drawn: no pipeline runs a {type(schedule).__name__}; leave out measuring"
        )
    schedule = plain
    table = costs.table(schedule.num_stages)
    own = schedule.stages_of(comm.rank)
    stages = [EmulatedStage(*(table[op][s] for op in HALVES)) for s in own]
    pipeline = Pipeline(stages, comm, schedule, loss_fn=lambda output, target: output.mean())
    batch = torch.ones(schedule.num_microbatches, 1)
    for _ in range(steps):
        comm.barrier()
        pipeline.step(batch, batch)
    return pipeline.spans
