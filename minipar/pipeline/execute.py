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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minipar.comm import Comm
from minipar.comm.agreement import require_equal
from minipar.mesh.shard_gradient import mark_gradient
from minipar.model import IGNORE_INDEX
from minipar.model.evaluating import evaluating
from minipar.pipeline.batch import Batch, split_batch
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
    reshard_stages  reshard a stage wrapped in FSDP when this rank turns to another stage. With
                FSDP(reshard_after_forward=False) a stage is then gathered once per visit (`Schedule.visits`), not twice
                per microbatch

    A stage wrapped in data parallelism (with `no_sync()` and `synchronize()`) is synchronised once per step: during
    its last backward, or right after its last W. After that, at the end of the step, the first and the last stage of
    a model with tied embeddings sum their gradients. An optimizer that shards gradients (ZeRO) must reduce them after
    the step: run the step under its `no_sync()`.

    Gradients equal those accumulated over the microbatches in one process, bit for bit wherever each stage runs its B
    (or its I and its W) in ascending order of microbatches, as in every generated schedule. A tied weight's gradient is
    equal up to rounding, because its two parts are accumulated separately.

    Sends m * elements of a stage's output per direction, for each boundary between stages on different ranks, and
    80 bytes once for its shape; at construction, a digest of 16 bytes to each other rank; with tied embeddings, also V * D
    elements per step each way.
    Raises ValueError for a schedule that cannot train, does not fit or is another on another rank, and for outputs that
    change their shape.
    """

    runs: ClassVar[type[Schedule]] = Schedule  # a schedule with rules of its own has a subclass of Pipeline

    def __init__(
        self,
        stages: Sequence[nn.Module],
        comm: Comm,
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        checkpoint: bool | Collection[int] = False,
        reshard_stages: bool = False,
    ):
        _require_same_schedule(comm, schedule)
        validate(schedule)
        numbers = self._require_fit(stages, comm, schedule)
        self.comm, self.schedule, self.loss_fn = comm, schedule, loss_fn
        self.stages: dict[int, Stage] = {}
        for number, module in zip(numbers, stages):
            recompute = checkpoint if isinstance(checkpoint, bool) else number in checkpoint
            own = [action for action in schedule.actions[comm.rank] if action.stage == number]
            split = {action.microbatch for action in own if action.op == "W"}
            forwards = sum(action.op == "F" for action in own)
            self.stages[number] = self._make_stage(module, number, forwards, split, recompute)
        self.spans: dict[Action, Span] = {}  # when each action of the last step ran, by the host's clock
        self._leaves = {visit[-1] for visit in schedule.visits(comm.rank)} if reshard_stages else set()
        self._program = lower(schedule)[comm.rank]
        self._mailbox = self._make_mailbox()
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
        A Transformer without `sample_ids` gets 0 ... B-1.
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
        has_loss = self.schedule.num_stages - 1 in self.stages
        batch = Batch(
            self._cut_tokens("inputs", inputs) if 0 in self.stages else (),
            self._cut_tokens("targets", targets) if has_loss else (),
            {name: self._cut_samples(name, x) for name, x in (per_sample or {}).items()},
            stage_kwargs or {},
        )
        return _Step(self, batch, self._divisor(targets if has_loss else None, count), loss_scale)

    def _require_fit(self, stages: Sequence[nn.Module], comm: Comm, schedule: Schedule) -> tuple[int, ...]:
        """Return the numbers of this rank's stages. Raises ValueError if schedule, ranks and modules do not match."""
        if type(schedule) is not self.runs:
            raise ValueError(
                f"schedule {schedule.name} is a {type(schedule).__name__}, and this pipeline runs a {self.runs.__name__}; "
                "use the pipeline that comes with the schedule"
            )
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

    def _make_mailbox(self) -> Mailbox:
        return Mailbox(self.comm, self.schedule)

    def _make_stage(
        self, module: nn.Module, number: int, num_microbatches: int, split: set[int], recompute: bool
    ) -> Stage:
        return Stage(module, number, num_microbatches, split, recompute)

    def _cut_tokens(self, name: str, x: Tensor | None) -> tuple[Tensor, ...]:
        """Cut the inputs (which the first stage's rank needs) or the targets (the last stage's rank) into microbatches."""
        if x is None:
            raise ValueError(
                f"{name}=None on rank {self.comm.rank}, which holds stages {[*self.stages]}; give the batch"
            )
        return self._cut_samples(name, x)

    def _cut_samples(self, name: str, x: Tensor) -> tuple[Tensor, ...]:
        return split_batch(name, x, self.schedule.num_microbatches)

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
            stage.begin()
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
        _, number, k = action
        x = self._results.pop(Action("F", number - 1, k)) if number else self._batch.inputs[k]
        if number == self._schedule.num_stages - 1:
            loss = self._forward_to_loss(stage, k, x)
            self._loss = loss if self._loss is None else self._loss + loss
        else:
            out = stage.forward(k, x, self._batch.kwargs(k))
            self._mailbox.agree(action, out)
            self._results[action] = out

    def _forward_to_loss(self, stage: Stage, k: int, x: Tensor) -> Tensor:
        """Run the last stage; return the microbatch's share of the batch's loss."""
        loss_fn, target, kwargs = self._pipeline.loss_fn, self._batch.targets[k], self._batch.kwargs(k)
        if loss_fn is None:
            return stage.forward(k, x, {**kwargs, "targets": target}, self._share)
        return stage.forward(k, x, kwargs, lambda out: self._share(loss_fn(out, target)))

    def _share(self, loss: Tensor) -> Tensor:
        if loss.dim():
            raise ValueError(
                f"a microbatch's loss has shape {tuple(loss.shape)}; use a loss_fn that returns one number"
            )
        return loss / self._divisor

    def _backward(self, stage: Stage, action: Action) -> None:
        _, number, k = action
        if number == self._schedule.num_stages - 1:
            assert self._loss is not None, "the forward came before"
            gradient = torch.full_like(self._loss, self._loss_scale)
        else:
            gradient = self._results.pop(Action("I", number + 1, k))
        of_input = stage.backward(k, gradient)
        if of_input is not None:
            self._results[Action("I", number, k)] = of_input


def _require_same_schedule(comm: Comm, schedule: Schedule) -> None:
    entries: dict[str, object] = {"class": type(schedule).__name__}
    entries |= {name: getattr(schedule, name) for name in ("name", "num_microbatches", "stage_rank")}
    entries["actions"] = f"of checksum {zlib.crc32(repr(schedule.actions).encode()):08x}"
    require_equal(comm, "pipeline schedules", entries, "give all ranks the same schedule")
