"""Pipeline: one executor for any schedule.

`simple/pipeline.py`, plus any schedule, receives posted early, deferred weight gradients, data parallelism, tied weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.model import IGNORE_INDEX
from minipar.pipeline.batch import Batch, split_batch, split_units
from minipar.pipeline.mailbox import Mailbox
from minipar.pipeline.stage import Stage
from minipar.pipeline.tied import TiedGradients
from minipar.schedules.lower import Compute, Instruction, Receive, Send, Wait, lower
from minipar.schedules.schedule import Action, Schedule, output_key
from minipar.schedules.timeline import Span
from minipar.schedules.validate import validate
from minipar.trace import span


class Pipeline:
    """This rank's stages of a model, trained by a schedule.

    stages      the modules this rank holds, in the order of `schedule.stages_of`; each takes one tensor and returns one
    comm        the ranks of the pipeline, as many as the schedule has
    schedule    the actions of each rank, in order; anything `validate` accepts
    loss_fn     (output, targets) -> the mean over a microbatch's samples. None: the last stage, called with
                `targets=`, returns a sum over tokens, as Transformer does
    checkpoint  activation checkpointing: True for all stages, or the numbers of those that save only each
                microbatch's input and recompute its forward in the backward
    slice_sizes  tokens of each slice of a sample, where the schedule has slices; None: as equal as can be

    A stage wrapped in data parallelism (with `no_sync()` and `synchronize()`) is synchronised once per step: during
    its last backward, or right after its last W. After that, at the end of the step, the first and the last stage of
    a model with tied embeddings sum their gradients. An optimizer that shards gradients (ZeRO) must reduce them after
    the step: run the step under its `no_sync()`. Each of two copies of the model computes a part of the gradients: wrap
    its stages in data parallelism over the ranks with the same parts, too.

    Gradients are those of accumulating over the microbatches in one process, bit for bit wherever each stage
    runs its B (or its I and its W) in ascending order of microbatches, as every generated schedule does. A tied
    weight's gradient is equal to rounding, because its two parts are accumulated separately; so are all gradients where
    samples are cut into slices.

    Sends m * elements of a stage's output per direction, for each boundary between stages on different ranks, and
    80 bytes once for the shape of each slice; with tied embeddings, V * D elements per step each way.
    Raises ValueError for a schedule that cannot train or does not fit, and for outputs that change their shape.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        comm: Comm,
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        checkpoint: bool | Collection[int] = False,
        slice_sizes: Sequence[int] | None = None,
    ):
        validate(schedule)
        own = _require_fit(stages, comm, schedule, loss_fn)
        self.comm, self.schedule, self.loss_fn, self.slice_sizes = comm, schedule, loss_fn, slice_sizes
        self._reads_inputs, self._has_loss = any(map(schedule.is_first, own)), any(map(schedule.is_last, own))
        split = {s: {a.microbatch for a in schedule.actions[comm.rank] if a[:2] == ("W", s)} for s in own}
        remat = {s for s in own if (checkpoint if isinstance(checkpoint, bool) else s in checkpoint)}
        parts = {s: (x, schedule.part(s), split[s], s in remat, schedule.slices) for s, x in zip(own, stages)}
        self.stages = {s: Stage(*part) for s, part in parts.items()}
        self.spans: dict[Action, Span] = {}  # when each action of the last step ran, by the host's clock
        self._program = lower(schedule)[comm.rank]
        self._mailbox = Mailbox(comm, schedule)
        self._tied = TiedGradients(comm, schedule, list(self.stages.values()))

    def step(
        self,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        count: int | Tensor | None = None,
        per_sample: dict[str, Tensor] | None = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor | None:
        """Add the gradients of one batch to `.grad`; return the loss on the last stage's rank, None on the others.

        inputs        [B, ...] on the rank of stage 0; m divides B, and the batch is cut along dim 0
        targets       [B, ...] on the rank of the last stage
        count         the divisor of the sum of the microbatches' losses. Default: m with a `loss_fn`, which returns
                      means; without one, the number of targets that are not -100. Where several pipelines share a
                      batch, give each the whole batch's count: their losses and gradients then sum to the whole's
        per_sample    keyword arguments of this rank's stages that are cut like the batch, such as `sample_ids`
        stage_kwargs  keyword arguments passed whole, such as `positions` and `step`
        loss_scale    multiplies the gradients, not the loss that is returned

        A Transformer without `sample_ids` gets 0 ... B-1. Of two copies of the model, both last stages return a part.
        """
        step = self._prepared(inputs, targets, count, per_sample, stage_kwargs, loss_scale)
        self._tied.begin()
        try:
            loss = step.run(self._program)
        finally:
            for stage in self.stages.values():
                stage.end()
        self._tied.finish()
        return loss

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, **options
    ) -> Tensor | None:
        """Return the loss of a batch as `step` with the same arguments would, but without dropout and gradients.

        Runs only the schedule's forwards. Sends m * elements of a stage's output for each boundary between ranks.
        """
        step = self._prepared(inputs, targets, **options)
        modules = [stage.module for stage in self.stages.values() if stage.module.training]
        for module in modules:
            module.eval()
        try:
            return step.run(instruction for instruction in self._program if instruction.action.op == "F")
        finally:
            for module in modules:
                module.train()
            for stage in self.stages.values():
                stage.end()

    def _prepared(self, inputs, targets, count=None, per_sample=None, stage_kwargs=None, scale=1.0) -> _Step:
        batch = self._cut(inputs, targets, per_sample or {}, stage_kwargs or {})
        return _Step(self, batch, self._divisor(targets, count), scale)

    def forget_shapes(self) -> None:
        """Allow the next step's outputs to have other shapes than the last step's. Call it on every rank."""
        self._mailbox.forget()

    def _cut(self, inputs, targets, per_sample: dict, whole: dict) -> Batch:
        m, slices, holds = self.schedule.num_microbatches, self.schedule.slices, self.stages
        ends = {"inputs": (inputs, self._reads_inputs), "targets": (targets, self._has_loss)}
        for name, (value, needed) in ends.items():
            if needed and value is None:
                rank = self.comm.rank
                raise ValueError(f"{name}=None on rank {rank}, which holds stages {[*holds]}; give the batch")
        given = {name: value for name, (value, needed) in ends.items() if needed}
        units = {name: split_units(name, x, m, slices, self.slice_sizes) for name, x in given.items()}
        pieces = {name: split_batch(name, x, m) for name, x in per_sample.items()}
        return Batch(units.get("inputs"), units.get("targets"), pieces, whole, slices)

    def _divisor(self, targets: Tensor | None, count):
        if not self._has_loss:
            return None
        if count is None:
            count = self.schedule.num_microbatches if self.loss_fn else (targets != IGNORE_INDEX).sum()
        return torch.as_tensor(count).clamp(min=1)


class _Step:
    """One run of the program, with the results not consumed yet: each is consumed once."""

    def __init__(self, pipeline: Pipeline, batch: Batch, divisor: Tensor | None, loss_scale: float):
        self._pipeline, self._batch, self._divisor, self._loss_scale = pipeline, batch, divisor, loss_scale
        self._results: dict[Action, Tensor] = {}
        self._loss: Tensor | None = None

    def run(self, program: Iterable[Instruction]) -> Tensor | None:
        pipeline, mailbox = self._pipeline, self._pipeline._mailbox
        pipeline.spans = {}
        mailbox.begin()
        for stage in pipeline.stages.values():
            stage.begin(pipeline.schedule.num_units // pipeline.schedule.copies)
        for instruction in program:
            match instruction:
                case Receive(action, source):
                    mailbox.receive(action, source)
                case Wait(action):
                    with span(pipeline.comm.trace, "wait", f"for {action}"):
                        self._results[output_key(action)] = mailbox.wait(action)
                case Compute(action):
                    self._compute(action)
                case Send(action, to):
                    mailbox.send(action, self._results.pop(output_key(action)), to)
        mailbox.finish()
        return self._loss

    def _compute(self, action: Action) -> None:
        stage, start_s = self._pipeline.stages[action.stage], time.perf_counter()
        with span(self._pipeline.comm.trace, "compute", str(action)):
            if action.op == "F":
                self._forward(stage, action)
            elif action.op == "W":
                stage.weight_backward(action.microbatch)
            else:
                self._backward(stage, action)
        self._pipeline.spans[action] = (start_s, time.perf_counter())
        if stage.done:
            stage.synchronize()

    def _forward(self, stage: Stage, action: Action) -> None:
        _, number, k = action
        x = self._results.pop(Action("F", number - 1, k)) if stage.number else self._batch.inputs[k]
        kwargs = self._batch.kwargs(k)
        if not self._pipeline.schedule.is_last(number):
            out = stage.forward(k, x, kwargs)
            self._pipeline._mailbox.agree(action, out)
            self._results[action] = out
            return
        loss_fn, target = self._pipeline.loss_fn, self._batch.targets[k]
        if loss_fn is None:
            loss = stage.forward(k, x, {**kwargs, "targets": target}, self._shared)
        else:
            loss = stage.forward(k, x, kwargs, lambda out: self._shared(loss_fn(out, target)))
        self._loss = loss if self._loss is None else self._loss + loss

    def _shared(self, loss: Tensor) -> Tensor:
        """Return the microbatch's share of the batch's loss."""
        if loss.dim():
            raise ValueError(
                f"a microbatch's loss has shape {tuple(loss.shape)}; use a loss_fn that returns one number"
            )
        return loss / self._divisor

    def _backward(self, stage: Stage, action: Action) -> None:
        _, number, k = action
        if self._pipeline.schedule.is_last(number):
            gradient = torch.full_like(self._loss, self._loss_scale)
        else:
            gradient = self._results.pop(Action("I", number + 1, k))
        gradient = stage.backward(k, gradient)
        if stage.number:
            self._results[Action("I", number, k)] = gradient


def _require_fit(stages: Sequence[nn.Module], comm: Comm, schedule: Schedule, loss_fn) -> tuple[int, ...]:
    """Return the numbers of this rank's stages. Raises ValueError where schedule, ranks and modules do not fit."""
    if schedule.slices > 1 and loss_fn is not None:
        raise ValueError(f"slices={schedule.slices} with a loss_fn: means do not add up; use loss_fn=None")
    if comm.size != schedule.num_ranks:
        raise ValueError(
            f"schedule {schedule.name} is for {schedule.num_ranks} ranks, the pipeline's comm has {comm.size}"
        )
    own = schedule.stages_of(comm.rank)
    if len(stages) != len(own):
        raise ValueError(
            f"{len(stages)} stages given on rank {comm.rank}, to which schedule {schedule.name} gives {len(own)}: "
            f"numbers {list(own)}"
        )
    return own
