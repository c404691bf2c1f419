"""Pipelines against torch.distributed.pipelining, and against what the simulator predicts."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
import torch.distributed.pipelining as theirs
import torch.nn.functional as F
from torch import nn

import minipar
from minipar.model import Linear, ModelConfig, Transformer
from minipar.pipeline import (
    SCHEDULES,
    Costs,
    Pipeline,
    Schedule,
    make_schedule,
    measured,
    partition,
    simulate,
)
from minipar.pipeline.emulate import emulate

CONFIG = ModelConfig(vocab_size=256, dim=128, num_layers=8, num_heads=4, max_seq_len=64)
SAMPLES_PER_MICROBATCH = 2
THEIR_SCHEDULES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "breadth-first": theirs.ScheduleLoopedBFS,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")  # theirs take one stage, the others a list


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def as_torch(module: nn.Module) -> nn.Module:
    """The same module with torch's own linear layers, at which theirs can split a backward."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            layer = nn.Linear(child.in_features, child.out_features, bias=False)
            layer.weight = child.weight
            setattr(module, name, layer)
        else:
            as_torch(child)
    return module


def our_step(world, schedule: Schedule, batch):
    stages = partition(Transformer(CONFIG), schedule.num_stages)
    own = [stages[s] for s in schedule.stages_of(world.rank)]
    pipeline = Pipeline(own, world, schedule, loss_fn=cross_entropy)
    return own, partial(pipeline.step, *batch)


def their_step(world, schedule: Schedule, batch):
    stages = partition(Transformer(CONFIG), schedule.num_stages)
    own = [stages[s] for s in schedule.stages_of(world.rank)]
    if any(action.op == "W" for actions in schedule.actions for action in actions):
        own = [as_torch(stage) for stage in own]
    wrapped = [
        theirs.PipelineStage(module, s, schedule.num_stages, torch.device("cpu"), group=world.process_group())
        for module, s in zip(own, schedule.stages_of(world.rank))
    ]
    make = THEIR_SCHEDULES[schedule.name]
    stage = wrapped[0] if schedule.name in SINGLE else wrapped
    runner = make(stage, schedule.num_microbatches, loss_fn=cross_entropy)
    holds = schedule.stages_of(world.rank)
    args = batch[:1] if 0 in holds else ()
    kwargs = {"target": batch[1], "losses": []} if schedule.num_stages - 1 in holds else {}
    return own, partial(runner.step, *args, **kwargs)


def time_both(world, schedule: Schedule, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, ours and theirs in turn."""
    torch.set_num_threads(1)
    size = schedule.num_microbatches * SAMPLES_PER_MICROBATCH
    batch = torch.randint(0, CONFIG.vocab_size, (2, size, CONFIG.max_seq_len)).unbind()
    runners = [our_step(world, schedule, batch), their_step(world, schedule, batch)]
    seconds = [[], []]
    for _ in range(repeats + 2):
        for (modules, step), times in zip(runners, seconds):
            for module in modules:
                module.zero_grad()
            world.barrier()
            start_s = time.perf_counter()
            step()
            world.barrier()
            times.append(time.perf_counter() - start_s)
    return tuple(times[2:] for times in seconds)
