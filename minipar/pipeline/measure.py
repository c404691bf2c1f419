"""Measured timelines and costs of a run, in the same form as simulated ones; and the measured costs of single layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from minipar.model import Transformer
from minipar.schedules.costs import Costs
from minipar.schedules.schedule import Action, Schedule
from minipar.schedules.timeline import Span, Timeline


def measured(schedule: Schedule, spans: Sequence[Mapping[Action, Span]]) -> Timeline:
    """Return the timeline of one step from every rank's `Pipeline.spans`, with time 0 at the first start.

    The ranks must share one clock, so they must be on one machine. On CUDA the times are the host's, which runs ahead of
    the GPU.
    Raises ValueError if an action of the schedule has no span.
    """
    merged = {action: own for rank in spans for action, own in rank.items()}
    if lacking := [action for actions in schedule.actions for action in actions if action not in merged]:
        raise ValueError(
            f"{len(lacking)} actions have no span, {lacking[0]} first; give the spans of every rank"
        )
    origin = min((start for start, _ in merged.values()), default=0.0)
    shifted = {action: (start - origin, end - origin) for action, (start, end) in merged.items()}
    return Timeline(schedule, shifted, measured_costs(schedule, shifted))


def measured_costs(schedule: Schedule, spans: Mapping[Action, Span], comm: float = 0.0) -> Costs:
    """Return the mean time of each op on each stage, for a simulation. If a stage runs B, not I and W, B counts as I."""
    sums: dict[tuple[str, int], list[float]] = {}
    for action, (start, end) in spans.items():
        sums.setdefault((action.op, action.stage), []).append(end - start)

    def mean(*ops: str) -> list[float]:
        """Return, for each stage, the mean duration of the first of these ops that the stage runs."""
        runs = ([sums[op, s] for op in ops if (op, s) in sums] for s in range(schedule.num_stages))
        return [sum(found[0]) / len(found[0]) if found else 0.0 for found in runs]

    return Costs(F=mean("F"), I=mean("I", "B"), W=mean("W"), comm=comm)


def measure_layers(
    model: Transformer | nn.Sequential, x: Tensor, repeats: int = 3, clock: Callable[[], float] | None = None
) -> list[float]:
    """Return the seconds of each layer's forward and backward, as costs for `partition(model, num_stages, costs)`.

    x  the input of the model: tokens of a microbatch, say

    A Transformer's first layer includes the embedding, its last the head. `clock` and `repeats` as in `seconds_of`.
    """
    if isinstance(model, nn.Sequential):
        return seconds_of(model, x, repeats, clock)
    n = len(model.layers)
    single = (model.stage([i], first=i == 0, last=i == n - 1) for i in range(n))
    return seconds_of(single, x, repeats, clock)


def seconds_of(
    layers: Iterable[nn.Module], x: Tensor, repeats: int = 3, clock: Callable[[], float] | None = None
) -> list[float]:
    """Return the least seconds in which each layer ran forward and backward, given the output of the layer before it.

    layers   may be made one at a time, so that only one is in memory
    repeats  runs of each layer that are timed, after one that is not
    clock    returns seconds; None: the host's clock, read when the GPU has finished
    """
    clock = _clock_of(x.device) if clock is None else clock
    costs = []
    for layer in layers:
        trained, seconds = [p for p in layer.parameters() if p.requires_grad], []
        for _ in range(1 + repeats):
            x = x.detach().requires_grad_(x.is_floating_point())
            start_s = clock()
            y = layer(x)
            inputs = [x] * x.requires_grad + trained
            torch.autograd.grad(
                y, inputs, torch.ones_like(y), allow_unused=True
            )  # leaves every .grad as it is
            seconds.append(clock() - start_s)
        costs.append(min(seconds[1:]))
        x = y.detach()
    return costs


def _clock_of(device: torch.device) -> Callable[[], float]:
    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
