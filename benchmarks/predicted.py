"""Step time predicted by the cost model, after calibration on this machine, beside measured

First with at most as many ranks as cores. Then with more ranks: blocks and head sleep for as long as their arithmetic is
predicted to take, so that only the rest is compared: pipelines, waits, messages. For each mesh, prints the predicted and
measured seconds of a step, their ratio, and the share of waiting for other ranks, predicted and traced. Below the table,
prints how many predictions are within 25 %, and Spearman's rank correlation.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import minipar
from minipar.comm import Comm
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.cost.machines import Machine
from minipar.cost.timing import step_time
from minipar.cost.work import head_seconds, layer_seconds
from minipar.extras.run.calibrate import calibrate
from minipar.mesh import Mesh
from minipar.model import Block, Transformer
from minipar.support.trace import Trace, busy_s
from minipar.train.data.text import load_text
from minipar.train.parallelize import parallelize
from minipar.train.planned import job_and_layout
from minipar.train.step import train_step

MODEL = ModelConfig(dim=256, num_layers=4, num_heads=4, max_seq_len=256)
RUN = TrainConfig(model=MODEL, batch_size=4, seq_len=128, steps=20, warmup=1, trace_steps=0)
WIDE = ModelConfig(dim=384, num_layers=4, num_heads=6, max_seq_len=256)
DEEP = replace(MODEL, num_layers=8)
EXPERTS = replace(MODEL, num_experts=4, top_k=1, capacity_factor=1.0)
CONFIGS: tuple[dict[str, Any], ...] = (
    {}, dict(seq_len=256), dict(batch_size=8), dict(recompute="full"), dict(model=WIDE), dict(model=DEEP),
    dict(dp=2), dict(dp=2, model=WIDE), dict(dp=2, zero=1), dict(dp=2, zero=2), dict(dp=2, zero=3, model=DEEP),
    dict(dp=2, microbatches=2), dict(tp=2), dict(tp=2, sequence_parallel=True), dict(tp=2, seq_len=256),
    dict(tp=2, recompute="full"), dict(pp=2, microbatches=2), dict(pp=2, microbatches=4),
    dict(pp=2, microbatches=4, schedule="gpipe"), dict(pp=2, microbatches=4, schedule="zb-h1"),
    dict(pp=2, microbatches=4, schedule="zb-v"), dict(pp=2, microbatches=4, schedule="interleaved", model=DEEP),
    dict(cp=2), dict(cp=2, cp_attention="ulysses", seq_len=256), dict(dp=2, ep=2, model=EXPERTS), dict(model=EXPERTS),
)  # fmt: skip

SLEEPS = "sleeps: "
# (forward, backward) seconds of a block, and of the head.
Sleeps = tuple[tuple[float, float], tuple[float, float]]
# For sleeping blocks: 256 tokens, whose own arithmetic takes almost no time.
TINY = ModelConfig(dim=32, num_layers=8, num_heads=4, hidden_dim=64, max_seq_len=16)
SLEEPY = replace(RUN, model=TINY, batch_size=16, seq_len=16)
BLOCK_S = 0.5  # forward and backward of a block for all tokens
MESHES: tuple[dict[str, Any], ...] = (
    {}, dict(dp=2), dict(dp=4), dict(dp=8), dict(dp=4, zero=1), dict(dp=2, zero=3), dict(dp=2, microbatches=4),
    dict(tp=2), dict(tp=4), dict(cp=2), dict(cp=4), dict(dp=2, tp=2), dict(dp=2, cp=2),
    *(dict(pp=pp, microbatches=m) for pp, m in ((2, 2), (2, 8), (4, 4), (4, 16), (8, 8))),
    dict(pp=4, microbatches=8, schedule="gpipe"), dict(pp=2, microbatches=4, schedule="interleaved"),
    dict(pp=4, microbatches=8, schedule="interleaved"), dict(pp=4, microbatches=8, schedule="breadth-first"),
    dict(dp=2, pp=2, microbatches=4), dict(dp=2, pp=4, microbatches=4), dict(tp=2, pp=2, microbatches=4),
    dict(dp=2, tp=2, pp=2, microbatches=4),
)  # fmt: skip


class Prediction(NamedTuple):
    """The seconds of a step, and the share of them spent waiting for other ranks, both predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_share: float
    measured_share: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


def rows(quick: bool = False) -> list[Prediction]:
    """Calibrate, then predict and measure every mesh that the cores allow."""
    cores = os.cpu_count() or 2
    with tempfile.TemporaryDirectory(prefix="minipar-") as folder:
        machine = calibrate(Path(folder) / "local.toml")
    every, rounds = (5, 2) if quick else (1, 5)
    found = [
        _row(replace(RUN, **changes), _name(changes), machine, rounds)
        for changes in CONFIGS[::every]
        if replace(RUN, **changes).world_size <= max(2, cores)
    ]
    sleepy = sleepy_machine(machine)
    return found + [
        _row(replace(SLEEPY, **changes), f"{SLEEPS}{_name(changes)}", sleepy, rounds)
        for changes in MESHES[::every]
    ]


def sleepy_machine(machine: Machine) -> Machine:
    """Return this machine with arithmetic so slow that a block of SLEEPY takes BLOCK_S."""
    job, layout = job_and_layout(SLEEPY, machine)
    seconds = layer_seconds(job, layout.tokens(job), 1, experts=False).total
    return replace(
        machine,
        peak_flops=machine.peak_flops * seconds / BLOCK_S,
        hbm_bytes_per_s=machine.hbm_bytes_per_s * seconds / BLOCK_S,
    )


def _row(config: TrainConfig, name: str, machine: Machine, rounds: int) -> Prediction:
    job, layout = job_and_layout(config, machine)
    step = step_time(job, layout)
    sleeps: Sleeps | None = None
    if name.startswith(SLEEPS):
        tokens = layout.tokens(job)
        both = layer_seconds(job, tokens, layout.tp, experts=False), head_seconds(job, tokens, layout.tp)
        of_block, of_head = ((s.forward, s.input_gradient + s.weight_gradient) for s in both)
        sleeps = of_block, of_head
        step = step._replace(parts=step.parts | {"update": 0.0})  # no rank sleeps for the update
    found = minipar.run(_measured, config, rounds, sleeps, world_size=config.world_size)
    measured = statistics.median(max(of_round) for of_round in zip(*(seconds for seconds, _ in found)))
    waits = statistics.mean(share for _, share in found)
    idle = step.communication + step.parts["idle"]  # a trace cannot tell a bubble from a message under way
    return Prediction(name, step.total, measured, idle / step.total, waits)


class _Sleep(torch.autograd.Function):
    """The identity function; its forward takes `forward_s`, its backward `backward_s`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return dx, None, None


def _sleeping(
    forward_s: float,
    backward_s: float,
    inner: Callable[..., Tensor] | None,
    forward: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
) -> Tensor:
    x = _Sleep.apply(x, forward_s, backward_s)  # type: ignore[no-untyped-call]
    return forward(x, *args) if inner is None else inner(forward, x, *args)


def _let_sleep(stages: list[Transformer], sleeps: Sleeps) -> None:
    block_s, head_s = sleeps
    for stage in stages:
        blocks = [module for module in stage.modules() if isinstance(module, Block)]
        for i, block in enumerate(reversed(blocks)):
            last = i == 0 and stage.last
            forward_s, backward_s = (a + b * last for a, b in zip(block_s, head_s))
            block.overrides.call = partial(_sleeping, forward_s, backward_s, block.overrides.call)


def _measured(
    world: Comm, config: TrainConfig, rounds: int, sleeps: Sleeps | None
) -> tuple[list[float], float]:
    mesh = Mesh(world, **config.mesh_sizes)
    state, text = parallelize(config, mesh, world.device), load_text(None)
    if sleeps is not None:
        _let_sleep(state.stages, sleeps)
    train_step(world, state, config, text, 0)
    seconds = []
    for step in range(1, rounds + 1):
        world.barrier()
        start_s = time.perf_counter()
        train_step(world, state, config, text, step)
        seconds.append(time.perf_counter() - start_s)
    world.trace = trace = Trace()
    start_s = time.perf_counter()
    train_step(world, state, config, text, rounds + 1)
    taken = time.perf_counter() - start_s
    world.trace = None
    main = [span for span in trace.spans if span.lane == "main"]
    return seconds, busy_s(main, "wait") / taken


def _name(changes: dict[str, Any]) -> str:
    sizes = {id(WIDE): "wide", id(DEEP): "deep", id(EXPERTS): "experts"}
    words = [sizes[id(v)] if k == "model" else f"{k}={v}" for k, v in changes.items()]
    return " ".join(words) or "one rank"


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences without ties: 1 - 6 sum d^2 / (n (n^2 - 1))."""
    places = [sorted(range(len(x)), key=x.__getitem__) for x in (a, b)]
    ranks = [{i: place for place, i in enumerate(order)} for order in places]
    n = len(a)
    return 1 - 6 * sum((ranks[0][i] - ranks[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def print_table(title: str, rows: Sequence[Prediction]) -> None:
    print(f"\n{title}\n{'':44}{'predicted':>11}{'measured':>11}{'ratio':>8}{'waits':>8}{'in trace':>10}")
    for r in rows:
        times = f"{1e3 * r.predicted_s:8.1f} ms{1e3 * r.measured_s:8.1f} ms{r.ratio:8.2f}"
        print(f"{r.name:44}{times}{r.predicted_share:8.0%}{r.measured_share:10.0%}", flush=True)
    for what, of_kind in (
        ("measured", [r for r in rows if not r.name.startswith(SLEEPS)]),
        ("sleeping", [r for r in rows if r.name.startswith(SLEEPS)]),
    ):
        near = sum(0.75 <= r.ratio <= 1.25 for r in of_kind)
        order = spearman([r.predicted_s for r in of_kind], [r.measured_s for r in of_kind])
        print(f"{what}: {near} of {len(of_kind)} within 25 %; Spearman's rank correlation {order:.2f}")
