"""Pipelines against torch.distributed.pipelining, and measured timelines against the simulator's predictions."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.distributed.pipelining as theirs
import torch.nn.functional as F
from torch import nn

import minipar
from benchmarks.harness import Row, on_cuda, race, row, run, worlds
from minipar.model import Linear, ModelConfig, Transformer
from minipar.pipeline import (
    SCHEDULES,
    Costs,
    Pipeline,
    Schedule,
    Timeline,
    balance,
    make_schedule,
    measured,
    partition,
)
from minipar.pipeline.emulate import emulate
from minipar.schedules.simulate import simulate

CONFIG = ModelConfig(vocab_size=256, dim=128, num_layers=8, num_heads=4, max_seq_len=64)
MICROBATCHES, SAMPLES = 8, 2  # SAMPLES in each microbatch
SINGLE_STAGE = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
SEVERAL_STAGES = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "breadth-first": theirs.ScheduleLoopedBFS,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
UNIT_S = 0.03  # of emulated compute, for each of F, I and W of all of a rank's stages
LAYERS, SPEEDS = (
    14,
    (1.0, 1.0, 0.5, 1.0),
)  # of a pipeline with a slow rank: it takes twice as long for a layer
LAYER_S = 0.01  # of a layer's F, I and W each, at speed 1


def rows(quick: bool = False) -> list[Row]:
    """Whole steps against torch's on 2 and 4 ranks; then runs of ranks that sleep against the simulator."""
    found = []
    for p in worlds():
        minipar.shutdown()  # torch's stages need a world of exactly p processes
        for name in (*SINGLE_STAGE, *SEVERAL_STAGES):
            schedule = make_schedule(name, p, MICROBATCHES)
            times = run(_race_steps, schedule, 5 if quick else 12, world_size=p)
            found.append(row(f"{name} step, {p} ranks", times, 1.0))
    if on_cuda():
        return found  # ranks that sleep need none
    timelines = {name: _emulated(name, 1 if quick else 3) for name in SCHEDULES}
    found += [_beside_predicted(timeline) for timeline in timelines.values()]
    found += [_bubbles(timelines["zb-h1"], timelines["1f1b"])]
    return [*found, _with_a_slow_rank(1 if quick else 3)]


# Against torch -----------------------------------------------------------------------------------------------------


def _race_steps(world, schedule: Schedule, rounds: int):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")
    shape = (2, MICROBATCHES * SAMPLES, CONFIG.max_seq_len)
    batch = (
        torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        .to(world.device)
        .unbind()
    )
    modules, our_step = _ours(world, schedule, batch)
    their_modules, their_step = _theirs(world, schedule, batch)
    our_step()
    their_step()
    for a, b in zip(modules, their_modules):  # the same work, or the ratio means nothing
        for p, q in zip(a.parameters(), b.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    return race(world, our_step, their_step, rounds)


def _ours(world, schedule: Schedule, batch):
    modules = _modules(world, schedule)
    pipeline = Pipeline(modules, world, schedule, loss_fn=_cross_entropy)
    return modules, partial(_clear_and_run, modules, partial(pipeline.step, *batch))


def _theirs(world, schedule: Schedule, batch):
    """torch's pipeline of the same modules; where backwards are split, with nn.Linear layers, which torch can split."""
    modules = _modules(world, schedule)
    if any(action.op == "W" for actions in schedule.actions for action in actions):
        modules = [_with_torch_layers(module) for module in modules]
    own, group = schedule.stages_of(world.rank), world.process_group()
    stages = [
        theirs.PipelineStage(module, s, schedule.num_stages, world.device, group=group)
        for module, s in zip(modules, own)
    ]
    if schedule.name in SINGLE_STAGE:
        runner = SINGLE_STAGE[schedule.name](stages[0], MICROBATCHES, loss_fn=_cross_entropy)
    else:
        runner = SEVERAL_STAGES[schedule.name](stages, MICROBATCHES, loss_fn=_cross_entropy)
    inputs = batch[:1] if 0 in own else ()
    targets = {"target": batch[1]} if schedule.num_stages - 1 in own else {}
    return modules, partial(_clear_and_run, modules, partial(runner.step, *inputs, **targets))


def _modules(world, schedule: Schedule) -> list[nn.Module]:
    stages = partition(Transformer(CONFIG, device=world.device), schedule.num_stages)
    return [stages[s] for s in schedule.stages_of(world.rank)]


def _with_torch_layers(module: nn.Module) -> nn.Module:
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear):
                replaced = nn.Linear(layer.in_features, layer.out_features, bias=False)
                replaced.weight = layer.weight
                setattr(parent, name, replaced)
    return module


def _cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _clear_and_run(modules, step) -> None:
    for module in modules:
        module.zero_grad()
    step()


# Against the simulator -----------------------------------------------------------------------------------------


def _costs(schedule: Schedule) -> Costs:
    """Costs per stage: a rank's share of the model takes UNIT_S, and its stages share that equally."""
    return Costs(*[UNIT_S * schedule.num_ranks / schedule.model_stages] * 3)


def _emulated(name: str, runs: int) -> Timeline:
    """The run with the smallest bubble, of several on four ranks that sleep: a disturbance can only make it larger."""
    schedule = make_schedule(name, 4, MICROBATCHES)
    timelines = [
        measured(schedule, run(emulate, schedule, _costs(schedule), world_size=4)) for _ in range(runs)
    ]
    return min(timelines, key=lambda timeline: timeline.bubble_over_total)


def _beside_predicted(timeline: Timeline) -> Row:
    """Compare the time taken with the time of the same work at the predicted bubble."""
    predicted = simulate(timeline.schedule, _costs(timeline.schedule)).bubble_over_total
    took_s, right_s = timeline.longest_own_span, timeline.ideal / (1 - predicted)
    note = f"bubble {timeline.bubble_over_total:.1%}, predicted {predicted:.1%}"
    return Row(f"{timeline.schedule.name} vs simulated", took_s, right_s, took_s / right_s, 1.05, note)


def _bubbles(split: Timeline, whole: Timeline) -> Row:
    idle_s = [timeline.longest_own_span - timeline.ideal for timeline in (split, whole)]
    return Row("bubble of zb-h1 vs 1f1b", *idle_s, idle_s[0] / idle_s[1], 0.4, "a third, predicted")


def _with_a_slow_rank(runs: int) -> Row:
    """Compare 1F1B whose layers are cut by the ranks' speeds with 1F1B whose layers are cut equally."""
    found, equal = (balance([1.0] * LAYERS, 4, speeds) for speeds in (SPEEDS, None))
    took_s, predicted_s = zip(*(_makespans(cut, runs) for cut in (found, equal)))
    note = (
        f"split {'-'.join(str(len(own)) for own in found)}, predicted {predicted_s[0] / predicted_s[1]:.2f}"
    )
    bar = 1.05 * predicted_s[0] / predicted_s[1]
    return Row("a slow rank: cut by speeds vs equal", *took_s, took_s[0] / took_s[1], bar, note)


def _makespans(cut: list[range], runs: int) -> tuple[float, float]:
    """The seconds of a step on ranks that sleep, the least of several, and those simulated."""
    schedule = make_schedule("1f1b", len(cut), MICROBATCHES)
    costs = Costs(*[[LAYER_S * len(own) / speed for own, speed in zip(cut, SPEEDS)]] * 3)
    emulated = (measured(schedule, run(emulate, schedule, costs, world_size=len(cut))) for _ in range(runs))
    return min(timeline.makespan for timeline in emulated), simulate(schedule, costs).makespan
