"""Pipelines against torch.distributed.pipelining, and measured timelines against the simulator's predictions."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed.pipelining as theirs
import torch.nn.functional as F
from torch import Tensor, nn

import minipar
from benchmarks.harness import Row, Step, Times, on_cuda, race, row, run, worlds
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.model import Linear, Transformer
from minipar.pipeline import Pipeline, balance, measured, partition
from minipar.pipeline.emulate import emulate
from minipar.schedules.costs import Costs
from minipar.schedules.registry import SCHEDULES, make_schedule
from minipar.schedules.schedule import Schedule
from minipar.schedules.simulate import simulate
from minipar.schedules.timeline import Timeline

CONFIG = ModelConfig(vocab_size=256, dim=128, num_layers=8, num_heads=4, max_seq_len=64)
Contender = tuple[list[nn.Module], Step]  # a rank's modules, and a step of the pipeline
MICROBATCHES, SAMPLES = 8, 2  # SAMPLES in each microbatch
SINGLE_STAGE = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
SEVERAL_STAGES = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "breadth-first": theirs.ScheduleLoopedBFS,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.ScheduleDualPipeV,
}
UNIT_S = 0.03  # emulated compute time for each of F, I and W, over all of a rank's stages
LAYERS, SPEEDS = 14, (1.0, 1.0, 0.5, 1.0)  # for a pipeline with a rank that takes twice as long for a layer
LAYER_S = 0.01  # time of each of F, I and W of a layer at speed 1


def rows(quick: bool = False) -> list[Row]:
    """Race whole steps against torch's on 2 and 4 ranks; then compare runs of sleeping ranks with the simulator."""
    found = []
    for p in worlds():
        minipar.shutdown()  # torch's stages need a world of exactly p processes
        for name in (*SINGLE_STAGE, *SEVERAL_STAGES):
            schedule = make_schedule(name, p, MICROBATCHES)
            times = run(_race_steps, schedule, 5 if quick else 12, world_size=p)
            found.append(row(f"{name} step, {p} ranks", times, 1.0))
    if on_cuda():
        return found  # sleeping ranks do not need torch
    timelines = {name: _emulated(name, 1 if quick else 3) for name in SCHEDULES}
    found += [_beside_predicted(timeline) for timeline in timelines.values()]
    found += [_bubbles(timelines["zb-h1"], timelines["1f1b"])]
    return [*found, _with_a_slow_rank(1 if quick else 3)]


# Against torch -----------------------------------------------------------------------------------------------------


def _race_steps(world: Comm, schedule: Schedule, rounds: int) -> Times:
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


def _ours(world: Comm, schedule: Schedule, batch: tuple[Tensor, ...]) -> Contender:
    modules = _modules(world, schedule)
    pipeline = Pipeline(modules, world, schedule, loss_fn=_cross_entropy)
    return modules, partial(_clear_and_run, modules, partial(pipeline.step, *batch))


def _theirs(world: Comm, schedule: Schedule, batch: tuple[Tensor, ...]) -> Contender:
    """Return torch's pipeline of the same modules; for split backwards, with nn.Linear layers, which torch can split."""
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
    targets: dict[str, Any] = {"target": batch[1]} if schedule.num_stages - 1 in own else {}
    return modules, partial(_clear_and_run, modules, partial(runner.step, *inputs, **targets))


def _modules(world: Comm, schedule: Schedule) -> list[nn.Module]:
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


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _clear_and_run(modules: list[nn.Module], step: Step) -> None:
    for module in modules:
        module.zero_grad()
    step()


# Against the simulator -----------------------------------------------------------------------------------------


def _costs(schedule: Schedule) -> Costs:
    """Return costs per stage: each op takes UNIT_S per rank, divided equally among the rank's stages."""
    return Costs(*[UNIT_S * schedule.num_ranks / schedule.num_stages] * 3)


def _emulated(name: str, runs: int) -> Timeline:
    """Return the run with the smallest bubble, of several runs on four sleeping ranks: disturbances only enlarge it."""
    schedule = make_schedule(name, 4, MICROBATCHES)
    timelines = [
        measured(schedule, run(emulate, schedule, _costs(schedule), world_size=4)) for _ in range(runs)
    ]
    return min(timelines, key=lambda timeline: timeline.bubble_over_total)


def _beside_predicted(timeline: Timeline) -> Row:
    """Compare the measured time with the time that the same work takes at the predicted bubble."""
    predicted = simulate(timeline.schedule, _costs(timeline.schedule)).bubble_over_total
    took_s, right_s = timeline.longest_own_span, timeline.ideal / (1 - predicted)
    note = f"bubble {timeline.bubble_over_total:.1%}, predicted {predicted:.1%}"
    return Row(f"{timeline.schedule.name} vs simulated", took_s, right_s, took_s / right_s, 1.05, note)


def _bubbles(split: Timeline, whole: Timeline) -> Row:
    ours_s, theirs_s = (timeline.longest_own_span - timeline.ideal for timeline in (split, whole))
    return Row("bubble of zb-h1 vs 1f1b", ours_s, theirs_s, ours_s / theirs_s, 0.4, "a third, predicted")


def _with_a_slow_rank(runs: int) -> Row:
    """Compare 1F1B with layers divided by the ranks' speeds and 1F1B with layers divided equally."""
    found, equal = (balance([1.0] * LAYERS, 4, speeds) for speeds in (SPEEDS, None))
    took_s, predicted_s = zip(*(_makespans(cut, runs) for cut in (found, equal)))
    note = (
        f"split {'-'.join(str(len(own)) for own in found)}, predicted {predicted_s[0] / predicted_s[1]:.2f}"
    )
    bar = 1.05 * predicted_s[0] / predicted_s[1]
    ours_s, theirs_s = took_s
    return Row("a slow rank: cut by speeds vs equal", ours_s, theirs_s, ours_s / theirs_s, bar, note)


def _makespans(cut: list[range], runs: int) -> tuple[float, float]:
    """Return the seconds of a step on sleeping ranks, the least of several runs, and the simulated seconds."""
    schedule = make_schedule("1f1b", len(cut), MICROBATCHES)
    costs = Costs(*[[LAYER_S * len(own) / speed for own, speed in zip(cut, SPEEDS)]] * 3)
    emulated = (measured(schedule, run(emulate, schedule, costs, world_size=len(cut))) for _ in range(runs))
    return min(timeline.makespan for timeline in emulated), simulate(schedule, costs).makespan
