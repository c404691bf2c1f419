"""Pipeline: one executor for any schedule.

Adds to `simple/pipeline.py`: any schedule, receives posted early, deferred weight gradients, data parallelism and tied
weights.

A schedule fixes the order of each rank's work. `lower` adds the sends and receives in the order of a simulated run, so that
no rank hangs; `_Step` executes the program. Results are stored under `output_key`, which is the same for a B's input
gradient and an I's.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.mesh.shard_gradient import mark_gradient
from minipar.model import IGNORE_INDEX
from minipar.model.evaluating import evaluating
from minipar.pipeline.batch import Batch, split_batch, split_units
from minipar.pipeline.mailbox import Mailbox
from minipar.pipeline.stage import Stage
from minipar.pipeline.tied import TiedGradients
from minipar.schedules.lower import Compute, Instruction, Receive, Send, Wait, lower
from minipar.schedules.schedule import Action, Schedule, output_key
from minipar.schedules.timeline import Span
from minipar.schedules.validate import validate
from minipar.support.trace import span


class Pipeline:
    """This rank's stages of a model, trained by a schedule.

    stages      the modules this rank holds, in the order of `schedule.stages_of`; each takes one tensor and returns one
    comm        the ranks of the pipeline, as many as the schedule has
    schedule    the actions of each rank, in order; anything `validate` accepts
    loss_fn     (output, targets) -> the mean over a microbatch's samples. None: the last stage, called with
                `targets=`, returns a sum over tokens, as Transformer does
    checkpoint  activation checkpointing: True for all stages, or the numbers of the stages that save only each
                microbatch's input and recompute its forward in the backward
    slice_sizes  tokens of each slice of a sample, where the schedule has slices; None: as equal as possible
    reshard_stages  reshard a stage wrapped in FSDP when this rank turns to another stage. With
                FSDP(reshard_after_forward=False) a stage is then gathered once per visit (`Schedule.visits`), not twice
                per microbatch

    A stage wrapped in data parallelism (with `no_sync()` and `synchronize()`) is synchronised once per step: during
    its last backward, or right after its last W. After that, at the end of the step, the first and the last stage of
    a model with tied embeddings sum their gradients. An optimizer that shards gradients (ZeRO) must reduce them after
    the step: run the step under its `no_sync()`. Where a schedule has two copies of the model, each copy computes a part of
    the gradients: wrap the stages in data parallelism over the ranks that hold the same stage, too.

    Gradients equal those accumulated over the microbatches in one process, bit for bit wherever each stage runs its B
    (or its I and its W) in ascending order of microbatches, as in every generated schedule. A tied weight's gradient is
    equal up to rounding, because its two parts are accumulated separately; so are all gradients where samples are cut
    into slices.

    Sends m * elements of a stage's output per direction, for each boundary between stages on different ranks, and
    80 bytes once for the shape of each slice; at construction, a digest of 16 bytes to each other rank; with tied
    embeddings, also V * D elements per step each way.
    Raises ValueError for a schedule that cannot train, does not fit or is another on another rank, and for outputs that
    change their shape.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        comm: Comm,
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        checkpoint: bool | Collection[int] = False,
        slice_sizes: Sequence[int] | None = None,
        reshard_stages: bool = False,
    ):
        _require_same_schedule(comm, schedule)
        validate(schedule)
        numbers = _require_fit(stages, comm, schedule, loss_fn)
        self.comm, self.schedule = comm, schedule
        self.loss_fn, self.slice_sizes = loss_fn, slice_sizes
        self.stages: dict[int, Stage] = {}
        for number, module in zip(numbers, stages):
            recompute = checkpoint if isinstance(checkpoint, bool) else number in checkpoint
            split = {k for op, stage, k in schedule.actions[comm.rank] if op == "W" and stage == number}
            away = {k for stage, k in schedule.offloaded if stage == number}
            if away and recompute:
                raise ValueError(
                    f"checkpoint={checkpoint} of stage {number}, whose units {schedule.name} offloads; checkpoint its "
                    "blocks instead (minipar.train.recompute)"
                )
            self.stages[number] = Stage(
                module, schedule.part(number), split, recompute, schedule.slices, away
            )
        self.spans: dict[Action, Span] = {}  # when each action of the last step ran, by the host's clock
        self._leaves = {visit[-1] for visit in schedule.visits(comm.rank)} if reshard_stages else set()
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
        """Add the gradients of one batch to `.grad`; return the loss on the last stage's rank, None on the other ranks.

        inputs        [B, ...] on the rank of stage 0; m divides B, and the batch is cut along dim 0
        targets       [B, ...] on the rank of the last stage
        count         the divisor of the sum of the microbatches' losses. Default: m with a `loss_fn`, which returns
                      means; without `loss_fn`, the number of targets that are not -100. Where several pipelines share a
                      batch, give each the whole batch's count: their losses and gradients then sum to the whole batch's
        per_sample    keyword arguments of this rank's stages that are cut like the batch, such as `sample_ids`
        stage_kwargs  keyword arguments that are not cut, such as `positions` and `step`
        loss_scale    multiplies the gradients, not the loss that is returned

        Gradients are `ShardGradient`s: clip with minipar.clip_grad_norm_, since torch's sees these stages only.
        A Transformer without `sample_ids` gets 0 ... B-1. With two copies of the model, each last stage returns a part of
        the loss.
        """
        step = self._prepare(inputs, targets, count, per_sample, stage_kwargs, loss_scale)
        self._tied.begin()
        try:
            loss = step.run(self._program)
            self._tied.finish()
        except BaseException:
            self._tied.restore()
            raise
        if self.comm.size > 1:
            for stage in self.stages.values():
                for parameter in stage.module.parameters():
                    mark_gradient(parameter)
        return loss

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensor | None = None, targets: Tensor | None = None, **options: Any
    ) -> Tensor | None:
        """Return the loss of a batch, like `step` with the same arguments, but without dropout and gradients.

        Runs only the schedule's forwards. Each boundary between ranks sends m times the elements of a stage's output.
        """
        step = self._prepare(inputs, targets, **options)
        with evaluating(*(stage.module for stage in self.stages.values())):
            return step.run(instruction for instruction in self._program if instruction.action.op == "F")

    def forget_shapes(self) -> None:
        """Allow outputs to change their shapes in the next step. Call it on every rank."""
        self._mailbox.forget()

    def _prepare(
        self,
        inputs: Tensor | None,
        targets: Tensor | None,
        count: int | Tensor | None = None,
        per_sample: dict[str, Tensor] | None = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_scale: float = 1.0,
    ) -> _Step:
        m = self.schedule.num_microbatches
        reads_inputs = any(map(self.schedule.is_first, self.stages))
        has_loss = any(map(self.schedule.is_last, self.stages))
        batch = Batch(
            self._cut("inputs", inputs) if reads_inputs else (),
            self._cut("targets", targets) if has_loss else (),
            {name: split_batch(name, x, m) for name, x in (per_sample or {}).items()},
            stage_kwargs or {},
            self.schedule.slices,
        )
        return _Step(self, batch, self._divisor(targets if has_loss else None, count), loss_scale)

    def _cut(self, name: str, x: Tensor | None) -> tuple[Tensor, ...]:
        """Cut the inputs (which the first stage's rank needs) or the targets (the last stage's rank) into units."""
        if x is None:
            raise ValueError(
                f"{name}=None on rank {self.comm.rank}, which holds stages {[*self.stages]}; give the batch"
            )
        return split_units(name, x, self.schedule.num_microbatches, self.schedule.slices, self.slice_sizes)

    def _divisor(self, targets: Tensor | None, count: int | Tensor | None) -> Tensor:
        """Return the divisor of the sum of the microbatches' losses; 1 on a rank without targets, which has no loss."""
        if targets is None:
            return torch.ones(())
        if count is None and self.loss_fn is not None:
            count = self.schedule.num_microbatches
        elif count is None:
            count = targets.ne(IGNORE_INDEX).sum()
        return torch.as_tensor(count).clamp(min=1)


class _Step:
    """One run of the program. Holds the results that are not consumed yet; each is consumed once."""

    def __init__(self, pipeline: Pipeline, batch: Batch, divisor: Tensor, loss_scale: float):
        self._pipeline, self._schedule, self._mailbox = pipeline, pipeline.schedule, pipeline._mailbox
        self._batch, self._divisor, self._loss_scale = batch, divisor, loss_scale
        self._results: dict[Action, Tensor] = {}
        self._loss: Tensor | None = None

    def run(self, program: Iterable[Instruction]) -> Tensor | None:
        """Run the instructions in order; return the loss, None on a rank without the last stage."""
        stages = self._pipeline.stages.values()
        self._pipeline.spans = {}
        self._mailbox.begin()
        for stage in stages:
            stage.begin(self._schedule.num_units // self._schedule.copies)
        try:
            for instruction in program:
                self._run(instruction)
            self._mailbox.finish()
        finally:
            for stage in stages:
                stage.end()
        return self._loss

    def _run(self, instruction: Instruction) -> None:
        match instruction:
            case Receive(action, source):
                self._mailbox.receive(action, source)
            case Wait(action):
                with span(self._pipeline.comm.trace, "wait", f"for {action}"):
                    self._results[output_key(action)] = self._mailbox.wait(action)
            case Compute(action):
                self._compute(action)
            case Send(action, to):
                self._mailbox.send(action, self._results.pop(output_key(action)), to)

    def _compute(self, action: Action) -> None:
        stage = self._pipeline.stages[action.stage]
        start_s = time.perf_counter()
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
        if action in self._pipeline._leaves:
            stage.reshard()

    def _forward(self, stage: Stage, action: Action) -> None:
        _, number, unit = action
        if self._schedule.is_first(number):
            x = self._batch.inputs[unit]
        else:
            x = self._results.pop(Action("F", number - 1, unit))
        if self._schedule.is_last(number):
            loss = self._forward_to_loss(stage, unit, x)
            self._loss = loss if self._loss is None else self._loss + loss
        else:
            out = stage.forward(unit, x, self._batch.kwargs(unit))
            self._mailbox.agree(action, out)
            self._results[action] = out

    def _forward_to_loss(self, stage: Stage, unit: int, x: Tensor) -> Tensor:
        """Run the last stage; return the unit's share of the batch's loss."""
        loss_fn, target, kwargs = self._pipeline.loss_fn, self._batch.targets[unit], self._batch.kwargs(unit)
        if loss_fn is None:
            return stage.forward(unit, x, {**kwargs, "targets": target}, self._share)
        return stage.forward(unit, x, kwargs, lambda out: self._share(loss_fn(out, target)))

    def _share(self, loss: Tensor) -> Tensor:
        if loss.dim():
            raise ValueError(
                f"a microbatch's loss has shape {tuple(loss.shape)}; use a loss_fn that returns one number"
            )
        return loss / self._divisor

    def _backward(self, stage: Stage, action: Action) -> None:
        _, number, unit = action
        if self._schedule.is_last(number):
            assert self._loss is not None, "the forward came before"
            gradient = torch.full_like(self._loss, self._loss_scale)
        else:
            gradient = self._results.pop(Action("I", number + 1, unit))
        of_input = stage.backward(unit, gradient)
        if of_input is not None:
            self._results[Action("I", number, unit)] = of_input


def _require_same_schedule(comm: Comm, schedule: Schedule) -> None:
    names = "name", "num_microbatches", "stage_rank", "slices", "copies", "actions"
    entries = {name: getattr(schedule, name) for name in names}
    entries["actions"] = f"of checksum {zlib.crc32(repr(entries['actions']).encode()):08x}"
    require_equal(comm, "pipeline schedules", entries, "give all ranks the same schedule")


def _require_fit(
    stages: Sequence[nn.Module], comm: Comm, schedule: Schedule, loss_fn: object
) -> tuple[int, ...]:
    """Return the numbers of this rank's stages. Raises ValueError if schedule, ranks and modules do not match."""
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
